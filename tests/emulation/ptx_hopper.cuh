// The instructions of csrc/cuda/common/ptx_hopper.cuh for the emulator. Contracts stand there.
//
// wgmma is as asynchronous as the architecture allows: from its issue until the wait that covers
// it, its accumulators hold a NaN of their own. Whoever reads them sees NaN, whoever writes them,
// or the A registers, ends the program, and so does a wgmma without a fence after a wait. Tensor
// copies likewise: their destination is NaN until somebody waits for their barrier.
#ifndef CONVNORMPOOL_PTX_HOPPER_CUH
#define CONVNORMPOOL_PTX_HOPPER_CUH

#include <deque>
#include <map>

#include "ptx.cuh"

#define CONVNORMPOOL_HOPPER 1

namespace convnormpool {

enum class WgmmaType { kF16, kBf16 };

// The emulator's tensor map: as many fields as the copy needs, the fastest axis first.
struct TensorMap {
  const char* base;
  uint32_t element_bytes;
  uint64_t extent[5], stride_bytes[5];
  uint32_t box[5];
};

}  // namespace convnormpool

namespace emu {

constexpr uint32_t kInFlight = 0x7FABCDEFu;

// One wgmma as one thread issued it.
struct Wgmma {
  convnormpool::WgmmaType type;
  int columns;
  bool accumulate;
  uint64_t descriptor;
  uint64_t a_descriptor;  // or 0: A is in registers
  float* d;
  const uint32_t* a;
  uint32_t a_values[4];
};

struct WgmmaState {
  bool fenced = false;
  std::deque<std::vector<Wgmma>> groups{std::vector<Wgmma>{}};
  // An accumulator in flight: what it will be, and how many wgmmas are still to be waited for.
  std::map<float*, std::pair<float, int>> in_flight;
};

inline float operand(convnormpool::WgmmaType type, uint32_t address, int column, int depth,
                     uint64_t descriptor) {
  const uint32_t depth_bytes = uint32_t(descriptor >> 16 & 0x3FFF) << 4;
  const uint32_t column_bytes = uint32_t(descriptor >> 32 & 0x3FFF) << 4;
  const char* p = shared_pointer(address + uint32_t(depth / 8) * depth_bytes +
                                 uint32_t(column / 8) * column_bytes +
                                 uint32_t(column % 8 * 16 + depth % 8 * 2));
  uint16_t bits;
  memcpy(&bits, p, 2);
  return type == convnormpool::WgmmaType::kF16 ? from_f16(bits) : from_bf16(bits);
}

// An element of A in shared memory, whose rows are neighbours.
inline float row_operand(convnormpool::WgmmaType type, uint32_t row, uint32_t depth,
                         uint64_t descriptor) {
  const uint32_t depth_bytes = uint32_t(descriptor >> 16 & 0x3FFF) << 4;
  const uint32_t row_bytes = uint32_t(descriptor >> 32 & 0x3FFF) << 4;
  const uint32_t address = uint32_t(descriptor & 0x3FFF) << 4;
  uint16_t bits;
  memcpy(&bits,
         shared_pointer(address + depth / 8 * depth_bytes + row / 8 * row_bytes + depth % 8 * 16 +
                        row % 8 * 2),
         2);
  return type == convnormpool::WgmmaType::kF16 ? from_f16(bits) : from_bf16(bits);
}

inline void compute_wgmma(Wgmma** slots, WgmmaState** states) {
  const Wgmma& w = *slots[0];
  for (unsigned t = 1; t < kWarpgroup; ++t) {
    if (slots[t]->descriptor != w.descriptor || slots[t]->columns != w.columns ||
        slots[t]->a_descriptor != w.a_descriptor) {
      fail("the threads of a wgmma disagree about its descriptor");
    }
  }
  if (w.descriptor >> 62 != 0) fail("wgmma: swizzled descriptors are not emulated");
  const uint32_t address = uint32_t(w.descriptor & 0x3FFF) << 4;
  constexpr int depth = 16;
  std::vector<float> b(size_t(depth * w.columns));
  for (int k = 0; k < depth; ++k) {
    for (int n = 0; n < w.columns; ++n) {
      b[size_t(k * w.columns + n)] = operand(w.type, address, n, k, w.descriptor);
    }
  }
  std::vector<float> a(size_t(64 * depth));
  for (unsigned i = 0; w.a_descriptor != 0 && i < a.size(); ++i) {
    a[i] = row_operand(w.type, i / depth, i % depth, w.a_descriptor);
  }
  for (unsigned t = 0; w.a_descriptor == 0 && t < kWarpgroup; ++t) {
    const unsigned row = t / 32 * 16 + t % 32 / 4, k = t % 4;
    for (unsigned i = 0; i < 4; ++i) {
      const uint32_t bits = slots[t]->a_values[i];
      const size_t at = size_t(row + i % 2 * 8) * size_t(depth);
      for (unsigned half = 0; half < 2; ++half) {
        const uint32_t part = half ? bits >> 16 : bits & 0xFFFF;
        a[at + 2 * k + half + i / 2 * 8] =
            w.type == convnormpool::WgmmaType::kF16 ? from_f16(part) : from_bf16(part);
      }
    }
  }
  for (unsigned t = 0; t < kWarpgroup; ++t) {
    for (int i = 0; i < w.columns / 2; ++i) {
      const size_t row = t / 32 * 16 + t % 32 / 4 + unsigned(i) % 4 / 2 * 8;
      const size_t column = size_t(i) / 4 * 8 + t % 4 * 2 + size_t(i) % 2;
      float* d = slots[t]->d + i;
      auto [entry, fresh] = states[t]->in_flight.try_emplace(d, *d, 0);
      if (!w.accumulate) entry->second.first = 0.f;
      double sum = double(entry->second.first);
      for (int k = 0; k < depth; ++k) {
        sum +=
            double(a[row * size_t(depth) + size_t(k)]) * double(b[size_t(k * w.columns) + column]);
      }
      entry->second.first = truncate_to_float(sum);
      ++entry->second.second;
      *d = __uint_as_float(kInFlight);
    }
  }
}

// A barrier in shared memory: its state stands here, the eight bytes there only name it.
struct Mbarrier {
  unsigned expected = 0, arrived = 0;
  int64_t bytes = 0;
  unsigned phase = 0;
  void settle() {
    if (arrived == expected && bytes == 0) {
      arrived = 0;
      ++phase;
    }
  }
};

struct PendingTensorCopy {
  uint32_t destination, barrier;
  std::vector<char> data;
};

struct HopperBlock {
  std::map<uint32_t, Mbarrier> barriers;
  std::vector<PendingTensorCopy> copies;
};

inline Mbarrier& mbarrier(uint32_t address) {
  auto& barriers = per_block<HopperBlock>().barriers;
  const auto found = barriers.find(address);
  if (found == barriers.end()) fail("0x%x is no mbarrier", address);
  return found->second;
}

// Completes a random one of the copies under way.
inline void advance_copies() {
  HopperBlock& block = per_block<HopperBlock>();
  if (block.copies.empty()) return;
  const size_t i = state().random() % block.copies.size();
  PendingTensorCopy copy = std::move(block.copies[i]);
  block.copies.erase(block.copies.begin() + long(i));
  memcpy(shared_pointer(copy.destination), copy.data.data(), copy.data.size());
  Mbarrier& barrier = mbarrier(copy.barrier);
  barrier.bytes -= int64_t(copy.data.size());
  barrier.settle();
  progress();
}

}  // namespace emu

namespace convnormpool {

inline void load_shared(uint32_t (&r)[4], uint32_t address) {
  if (address % 16 != 0) emu::fail("ld.shared.v4: address 0x%x is not aligned", address);
  memcpy(r, emu::shared_pointer(address), 16);
}
inline uint32_t load_shared(uint32_t address) {
  uint32_t r;
  memcpy(&r, emu::shared_pointer(address), 4);
  return r;
}
inline void load_shared(float (&r)[4], uint32_t address) {
  if (address % 16 != 0) emu::fail("ld.shared.v4: address 0x%x is not aligned", address);
  memcpy(r, emu::shared_pointer(address), 16);
}
inline void store_shared(uint32_t address, const float (&r)[4]) {
  if (address % 16 != 0) emu::fail("st.shared.v4: address 0x%x is not aligned", address);
  memcpy(emu::shared_pointer(address), r, 16);
}
inline void store_shared(uint32_t address, const float (&r)[2]) {
  if (address % 8 != 0) emu::fail("st.shared.v2: address 0x%x is not aligned", address);
  memcpy(emu::shared_pointer(address), r, 8);
}
inline void store_global(float* to, const float (&r)[4]) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0)
    emu::fail("st.global.v4: %p is not aligned", (void*)to);
  memcpy(to, r, 16);
}
inline void store_global(uint16_t* to, uint32_t low, uint32_t high) {
  if (reinterpret_cast<uintptr_t>(to) % 8 != 0)
    emu::fail("st.global.v2: %p is not aligned", (void*)to);
  const uint32_t words[2] = {low, high};
  memcpy(to, words, 8);
}
inline void load_shared(uint32_t (&r)[2], uint32_t address) {
  if (address % 8 != 0) emu::fail("ld.shared.v2: address 0x%x is not aligned", address);
  memcpy(r, emu::shared_pointer(address), 8);
}

inline void add_moments_if(float (&sum)[4], float (&square)[4], const float (&v)[4], int column,
                           int columns) {
  for (int i = 0; i < 4 && unsigned(column) < unsigned(columns); ++i) {
    sum[i] += v[i];
    square[i] = fmaf(v[i], v[i], square[i]);
  }
}

inline void add_if(float (&sum)[4], const float* v, uint32_t inside) {
  for (int i = 0; i < 4 && inside != 0; ++i) sum[i] += v[i];
}

inline void load_accumulators(float* d, uint32_t address) {
  float r[4];
  load_shared(r, address);
  for (int i = 0; i < 4; ++i) d[i] = r[i];
}

inline void multiply_beyond(float (&d)[4], const float (&y)[4], float limit, const float (&s)[4],
                            float edge, uint32_t inside) {
  for (int i = 0; i < 4; ++i) {
    if (fabsf(y[i]) >= limit || inside == 0) d[i] = s[i] * edge;
  }
}

inline void add_within(float (&d)[4], const float (&y)[4], float factor, float limit) {
  for (int i = 0; i < 4; ++i) {
    if (fabsf(y[i]) < limit) d[i] = fmaf(y[i], factor, d[i]);
  }
}

inline uint32_t distinct_copy(uint32_t x, uint32_t zero) { return x | zero; }

inline uint32_t wgmma_operand(uint32_t address, uint32_t depth_bytes) {
  if (address % 16 != 0) emu::fail("wgmma: address 0x%x is not aligned", address);
  return (address & 0x3FFFFu) >> 4 | depth_bytes >> 4 << 16;
}

inline uint64_t wgmma_descriptor(uint32_t operand) { return uint64_t{8} << 32 | operand; }

inline void wgmma_fence() { emu::per_thread<emu::WgmmaState>().fenced = true; }

inline void wgmma_commit() { emu::per_thread<emu::WgmmaState>().groups.emplace_back(); }

template <int Pending>
void wgmma_wait() {
  auto& state = emu::per_thread<emu::WgmmaState>();
  while (state.groups.size() > size_t(Pending) + 1) {
    for (const emu::Wgmma& w : state.groups.front()) {
      if (w.a != nullptr && memcmp(w.a, w.a_values, sizeof(w.a_values)) != 0) {
        emu::fail("A registers were written while a wgmma was reading them");
      }
      for (int i = 0; i < w.columns / 2; ++i) {
        const auto entry = state.in_flight.find(w.d + i);
        if (__float_as_uint(w.d[i]) != emu::kInFlight) {
          emu::fail("an accumulator was written while a wgmma was in flight");
        }
        if (--entry->second.second == 0) {
          w.d[i] = entry->second.first;
          state.in_flight.erase(entry);
        }
      }
    }
    state.groups.pop_front();
  }
  state.fenced = false;
}

namespace emulation {

inline void stmatrix(const char* name, uint32_t row_address, const uint32_t (&r)[4],
                     bool transposed, unsigned matrices = 4) {
  struct Slot {
    uint32_t address, r[4];
  } slot{row_address, {r[0], r[1], r[2], r[3]}};
  emu::warp_collective(name, ~0u, slot, [&](Slot** slots) {
    for (unsigned i = 0; i < matrices; ++i) {
      uint16_t matrix[8][8];
      for (unsigned lane = 0; lane < emu::kWarp; ++lane) {
        const unsigned g = lane / 4, k = lane % 4;
        const uint32_t pair = slots[lane]->r[i];
        (transposed ? matrix[2 * k][g] : matrix[g][2 * k]) = uint16_t(pair);
        (transposed ? matrix[2 * k + 1][g] : matrix[g][2 * k + 1]) = uint16_t(pair >> 16);
      }
      for (unsigned row = 0; row < 8; ++row) {
        const uint32_t address = slots[8 * i + row]->address;
        if (address % 16 != 0) emu::fail("%s: address 0x%x is not aligned", name, address);
        memcpy(emu::shared_pointer(address), matrix[row], 16);
      }
    }
  });
}

}  // namespace emulation

inline void stmatrix_x4(uint32_t row_address, const uint32_t (&r)[4]) {
  emulation::stmatrix("stmatrix", row_address, r, false);
}
inline void stmatrix_x4_trans(uint32_t row_address, const uint32_t (&r)[4]) {
  emulation::stmatrix("stmatrix.trans", row_address, r, true);
}
inline void stmatrix_x1_trans(uint32_t row_address, uint32_t r) {
  emulation::stmatrix("stmatrix.trans", row_address, {r, r, r, r}, true, 1);
}

template <int Count>
void pin_accumulators(float (&)[Count]) {}

template <int Count>
void pin_fragments(uint32_t (&)[Count][4]) {}

inline void set_accumulator(float& d, float value) { d = value; }
inline void scale_accumulator(float& d, float factor) { d *= factor; }

namespace emulation {

inline void issue_wgmma(const emu::Wgmma& wgmma) {
  auto& state = emu::per_thread<emu::WgmmaState>();
  if (!state.fenced) emu::fail("wgmma without a fence");
  struct Slot {
    emu::Wgmma wgmma;
    emu::WgmmaState* state;
  } slot{wgmma, &state};
  emu::warpgroup_collective("wgmma", slot, [](Slot** slots) {
    emu::Wgmma* wgmmas[emu::kWarpgroup];
    emu::WgmmaState* states[emu::kWarpgroup];
    for (unsigned t = 0; t < emu::kWarpgroup; ++t) {
      wgmmas[t] = &slots[t]->wgmma;
      states[t] = slots[t]->state;
    }
    emu::compute_wgmma(wgmmas, states);
  });
  state.groups.back().push_back(slot.wgmma);
}

}  // namespace emulation

template <WgmmaType Type, int N, bool Accumulate = true>
void wgmma(float* d, const uint32_t (&a)[4], uint64_t b) {
  emulation::issue_wgmma({Type, N, Accumulate, b, 0, d, a, {a[0], a[1], a[2], a[3]}});
}

template <WgmmaType Type, int N, bool Accumulate = true>
void wgmma(float* d, const uint32_t (&a)[4], uint32_t b) {
  wgmma<Type, N, Accumulate>(d, a, wgmma_descriptor(b));
}

template <WgmmaType Type, int N, int kColumnBytes, bool Accumulate = true>
void wgmma_shared(float* d, uint32_t a, uint32_t b) {
  emulation::issue_wgmma({Type,
                          N,
                          Accumulate,
                          uint64_t{kColumnBytes / 16} << 32 | b,
                          uint64_t{8} << 32 | a,
                          d,
                          nullptr,
                          {}});
}

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  if (barrier % 8 != 0) emu::fail("mbarrier 0x%x is not aligned", barrier);
  emu::per_block<emu::HopperBlock>().barriers[barrier] = emu::Mbarrier{arrivals};
}

inline void fence_proxy_async() {}

inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  emu::Mbarrier& b = emu::mbarrier(barrier);
  if (b.arrived == b.expected) emu::fail("mbarrier 0x%x: too many arrivals", barrier);
  ++b.arrived;
  b.bytes += bytes;
  b.settle();
  emu::progress();
}

inline void mbarrier_arrive(uint32_t barrier) { mbarrier_arrive_expect(barrier, 0); }

inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  emu::Mbarrier& b = emu::mbarrier(barrier);
  emu::wait_until("an mbarrier", [&] {
    emu::advance_copies();
    return (b.phase & 1) != parity;
  });
}

inline void tensor_copy(uint32_t destination, const TensorMap* map, uint32_t barrier, int c0,
                        int c1, int c2, int c3, int c4) {
  const int64_t start[5] = {c0, c1, c2, c3, c4};
  if (destination % 128 != 0) emu::fail("tensor copy to 0x%x: not aligned", destination);
  if (reinterpret_cast<uintptr_t>(map->base) % 16 != 0 ||
      map->box[0] * map->element_bytes % 16 != 0) {
    emu::fail("tensor copy: the base or the box's row is not a multiple of 16 bytes");
  }
  if (c0 * int64_t(map->element_bytes) % 16 != 0) {
    emu::fail("tensor copy: column %d is not a multiple of 16 bytes", c0);
  }
  size_t elements = 1;
  for (int axis = 0; axis < 5; ++axis) {
    if (axis > 0 && map->stride_bytes[axis] % 16 != 0) emu::fail("tensor copy: bad stride");
    if (map->box[axis] > 256) emu::fail("tensor copy: box of more than 256 elements");
    elements *= map->box[axis];
  }
  emu::PendingTensorCopy copy{destination, barrier,
                              std::vector<char>(elements * map->element_bytes, 0)};
  for (size_t i = 0; i < elements; ++i) {
    size_t rest = i;
    int64_t source = 0;
    bool inside = true;
    for (int axis = 0; axis < 5; ++axis) {
      const int64_t at = start[axis] + int64_t(rest % map->box[axis]);
      rest /= map->box[axis];
      inside = inside && at >= 0 && at < int64_t(map->extent[axis]);
      source += at * int64_t(axis == 0 ? map->element_bytes : map->stride_bytes[axis]);
    }
    if (inside) {
      memcpy(&copy.data[i * map->element_bytes], map->base + source, map->element_bytes);
    }
  }
  emu::shared_pointer(destination + uint32_t(copy.data.size()));
  memset(emu::shared_pointer(destination), 0xFF, copy.data.size());
  emu::per_block<emu::HopperBlock>().copies.push_back(std::move(copy));
}

}  // namespace convnormpool

#endif  // CONVNORMPOOL_PTX_HOPPER_CUH
