// Python's view of the planner (module convnormpool._plan). No torch headers, no CUDA.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "activation.h"
#include "cuda/activation_moments_partition.h"
#include "cuda/conv_activation_moments_backward_plan.h"
#include "plan.h"

namespace py = pybind11;

namespace convnormpool {
namespace {

using Triple = std::array<int64_t, 3>;

Problem make_problem(std::array<int64_t, 5> input, std::array<int64_t, 5> filter, Triple stride,
                     Triple padding, Triple dilation, int64_t groups, DType dtype,
                     Precision precision) {
  Problem p{};
  p.N = input[0], p.C = input[1], p.D = input[2], p.H = input[3], p.W = input[4];
  p.K = filter[0], p.T = filter[2], p.R = filter[3], p.S = filter[4];
  std::copy(stride.begin(), stride.end(), p.stride);
  std::copy(padding.begin(), padding.end(), p.padding);
  std::copy(dilation.begin(), dilation.end(), p.dilation);
  p.groups = groups;
  p.dtype = dtype;
  p.precision = precision;
  return p;
}

std::vector<std::string> activation_names() {
  std::vector<std::string> names;
  for (int32_t code = 0; code < kNumActivations; ++code) {
    names.emplace_back(activation_name(code));
  }
  return names;
}

}  // namespace
}  // namespace convnormpool

PYBIND11_MODULE(_plan, m) {
  using namespace convnormpool;
  m.doc() = "The planner: problem and device to path, parameters and reasons.";

  py::enum_<DType>(m, "DType")
      .value("float64", DType::kFloat64)
      .value("float32", DType::kFloat32)
      .value("float16", DType::kFloat16)
      .value("bfloat16", DType::kBFloat16);
  py::enum_<Precision>(m, "Precision")
      .value("ieee", Precision::kIeee)
      .value("tf32", Precision::kTf32);
  py::enum_<Path>(m, "Path")
      .value("fused", Path::kFused)
      .value("two_stage", Path::kTwoStage)
      .value("eager", Path::kEager);

  py::class_<Problem>(m, "Problem")
      .def(py::init(&make_problem), py::kw_only(), py::arg("input"), py::arg("filter"),
           py::arg("stride"), py::arg("padding"), py::arg("dilation"), py::arg("groups"),
           py::arg("dtype"), py::arg("precision"))
      .def_property_readonly("output",
                             [](const Problem& p) { return Triple{p.Z(), p.P(), p.Q()}; });

  py::class_<Device>(m, "Device")
      .def(py::init(
               [](bool cuda, int32_t major, int32_t minor, int32_t sm_count, int64_t l2_bytes,
                  bool sm_90a) { return Device{cuda, major, minor, sm_count, l2_bytes, sm_90a}; }),
           py::kw_only(), py::arg("cuda"), py::arg("major") = 0, py::arg("minor") = 0,
           py::arg("sm_count") = 0, py::arg("l2_bytes") = 0, py::arg("sm_90a") = false);

  py::class_<Decision>(m, "Decision")
      .def_readonly("path", &Decision::path)
      .def_readonly("backward_path", &Decision::backward_path)
      .def_readonly("reason", &Decision::reason)
      .def_readonly("backward_reason", &Decision::backward_reason)
      .def_readonly("kernel", &Decision::kernel)
      .def_readonly("wgmma", &Decision::wgmma)
      .def_readonly("kernel_reason", &Decision::kernel_reason)
      .def_readonly("workspace", &Decision::workspace)
      .def_readonly("alignment", &Decision::alignment)
      .def_readonly("backward_wgmma", &Decision::backward_wgmma)
      .def_readonly("backward_kernel_reason", &Decision::backward_kernel_reason)
      .def_readonly("chunk_samples", &Decision::chunk_samples)
      .def_readonly("chunk_planes", &Decision::chunk_planes)
      .def_readonly("channels_last", &Decision::channels_last)
      .def_readonly("unfolded_channels", &Decision::unfolded_channels);

  m.def("plan", &plan, py::arg("problem"), py::arg("device"), py::arg("requested") = py::none());
  m.def("activation_names", &activation_names);
  m.def("act_moments_workspace", &act_moments_workspace);
  m.def(
      "conv_act_moments_backward_workspace",
      [](const Problem& p, const Device& device, bool wgmma, bool input_gradient,
         bool filter_gradient) {
        return backward_workspace(p, device.sm_count, wgmma, input_gradient, filter_gradient)
            .total();
      },
      py::arg("problem"), py::arg("device"), py::arg("wgmma"), py::arg("input_gradient"),
      py::arg("filter_gradient"));
}
