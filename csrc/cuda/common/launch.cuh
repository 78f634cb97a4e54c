// The host side that every CUDA operator shares: tensors to plain pointers and dtype codes, the
// device and stream of a call, grids, and the check after a launch. No kernel sees a torch header.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string>

#include "activation.h"
#include "cuda/common/vector.cuh"
#include "problem.h"

namespace convnormpool {

using torch::stable::Tensor;

// The tensor's device is current, and its current stream known, while this lives.
class DeviceScope {
 public:
  explicit DeviceScope(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    const auto error = aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream);
    STD_TORCH_CHECK(error == 0, "torch names no current CUDA stream for device ",
                    tensor.get_device_index());
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

// Follows every launch: throws if the launch of `kernel`, for extents `shape`, failed.
inline void check_launch(const char* kernel, std::initializer_list<int64_t> shape) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return;
  std::ostringstream message;
  message << "the CUDA kernel " << kernel << " could not be launched for shape (";
  const char* separator = "";
  for (const int64_t extent : shape) {
    message << separator << extent;
    separator = ", ";
  }
  message << "): " << cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    int device = 0, major = 0, minor = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    message << ". This build of convnormpool holds no code for the device's compute capability "
            << major << '.' << minor << "; build it again with TORCH_CUDA_ARCH_LIST=" << major
            << '.' << minor;
  }
  STD_TORCH_CHECK(false, message.str());
}

// Launches a kernel that may begin while the one before it in the stream ends, whatever that is:
// the kernel calls grid_dependency_wait() in all its threads before it touches memory, and so has
// that one's results, and those of all before it, since none that begins early ends before it has
// waited. check_launch follows, as for every launch.
template <class... Parameters, class... Arguments>
void launch_dependent(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, size_t shared_bytes,
                      cudaStream_t stream, const Arguments&... arguments) {
  // Code made from PTX of an earlier architecture does not wait, whatever device it runs on.
  cudaFuncAttributes code{};
  const bool waits = cudaFuncGetAttributes(&code, kernel) == cudaSuccess && code.ptxVersion >= 90;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = waits ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

// A grid of `columns` blocks for each of `rows` rows, which kernels read by grid_row(). y and z are
// both used, and evenly, because each ends at 65535.
inline dim3 row_grid(int64_t columns, int64_t rows) {
  constexpr int64_t kMost = 65535;
  const int64_t z = (rows + kMost - 1) / kMost;
  STD_TORCH_CHECK(columns < (int64_t{1} << 31) && z <= kMost, "a grid of ", columns, " x ", rows,
                  " blocks is more than CUDA launches");
  const int64_t y = (rows + z - 1) / z;
  return dim3(static_cast<unsigned>(columns), static_cast<unsigned>(y), static_cast<unsigned>(z));
}

inline unsigned linear_grid(int64_t blocks) {
  STD_TORCH_CHECK(blocks < (int64_t{1} << 31), "a grid of ", blocks,
                  " blocks is more than CUDA launches");
  return static_cast<unsigned>(blocks);
}

inline bool aligned_to(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

inline DType dtype_of(const Tensor& tensor, const char* name) {
  using torch::headeronly::ScalarType;
  switch (tensor.scalar_type()) {
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    default:
      STD_TORCH_CHECK(false, name, " must be float64, float32, float16 or bfloat16");
  }
  return DType::kFloat32;
}

inline DType statistics_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// A contiguous tensor of `numel` elements on the device of `like`; extents were checked in Python.
inline void check_dense(const Tensor& tensor, const char* name, int64_t numel, const Tensor& like) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == like.get_device_index(), name,
                  " must be on CUDA device ", like.get_device_index());
  STD_TORCH_CHECK(tensor.numel() == numel, name, " must have ", numel, " elements, not ",
                  tensor.numel());
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
}

inline void check_statistics(const Tensor& tensor, const char* name, int64_t numel, DType dtype,
                             const Tensor& like) {
  check_dense(tensor, name, numel, like);
  STD_TORCH_CHECK(dtype_of(tensor, name) == dtype, name, " must be ",
                  dtype == DType::kFloat64 ? "float64" : "float32");
}

inline TypedPointer typed(const Tensor& tensor, const char* name) {
  return {tensor.data_ptr(), dtype_of(tensor, name)};
}

// An optional tensor of the four dtypes; null where there is none.
inline TypedPointer typed(const std::optional<Tensor>& tensor, const char* name, int64_t numel,
                          const Tensor& like) {
  if (!tensor) return {nullptr, DType::kFloat32};
  check_dense(*tensor, name, numel, like);
  return typed(*tensor, name);
}

inline void check_activation(int64_t code) {
  STD_TORCH_CHECK(activation_name(code) != nullptr, "activation ", code, " is none");
}

// The extents and the layout of a dense (N, K, *) tensor.
struct DenseLayout {
  int64_t N, K, positions;
  bool channels_last;
};

inline DenseLayout dense_layout(const Tensor& y, const char* name) {
  const int64_t dim = y.dim();
  STD_TORCH_CHECK(y.is_cuda(), name, " must be a CUDA tensor");
  STD_TORCH_CHECK(dim >= 2, name, " must have at least two dimensions, not ", dim);
  DenseLayout layout = {y.size(0), y.size(1), 1, false};
  for (int64_t i = 2; i < dim; ++i) layout.positions *= y.size(i);
  if (y.is_contiguous()) return layout;
  layout.channels_last = true;
  bool dense = layout.K == 1 || y.stride(1) == 1;
  int64_t stride = layout.K;
  for (int64_t i = dim - 1; i >= 2; --i) {
    dense = dense && (y.size(i) == 1 || y.stride(i) == stride);
    stride *= y.size(i);
  }
  dense = dense && (layout.N == 1 || y.stride(0) == stride);
  STD_TORCH_CHECK(dense, name, " must be contiguous or channels-last");
  return layout;
}

// f(T{}) for the storage type T of a dtype.
template <typename F>
void dispatch_storage(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat64:
      return f(double());
    case DType::kFloat32:
      return f(float());
    case DType::kFloat16:
      return f(__half());
    case DType::kBFloat16:
      return f(__nv_bfloat16());
  }
}

}  // namespace convnormpool
