// The instructions of csrc/cuda/common/ptx.cuh for the emulator; included before any kernel, its
// guard then keeps the real ones out. Contracts and fragment maps stand there.
#ifndef CONVNORMPOOL_PTX_CUH
#define CONVNORMPOOL_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "emulator.h"

namespace emu {

// The tensor cores keep a few more bits than float while they add and then truncate.
inline float truncate_to_float(double x) {
  float f = float(x);
  if (std::isfinite(x) && std::fabs(double(f)) > std::fabs(x)) f = nextafterf(f, 0.f);
  return f;
}

inline float from_f16(uint32_t bits) {
  return float(__half(__half_raw{static_cast<unsigned short>(bits)}));
}
inline float from_bf16(uint32_t bits) { return __uint_as_float(bits << 16); }

struct MmaSlot {
  uint32_t a[4], b[2];
  float c[4], d[4];
};

// Half of an unoptimised program's time would go here.
#if defined(__GNUC__) && !defined(__clang__)
#define EMU_OPTIMISED __attribute__((optimize("O2"), no_sanitize("address", "undefined")))
#else
#define EMU_OPTIMISED
#endif
template <int Depth>
EMU_OPTIMISED void add_products(const float (&a)[16][Depth], const float (&b)[Depth][8],
                                double (&d)[16][8]) {
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < Depth; ++k) {
      for (int column = 0; column < 8; ++column) {
        d[row][column] += double(a[row][k]) * double(b[k][column]);
      }
    }
  }
}

// D = A · B + C over 16 × Depth and Depth × 8 operands that the unpackers spread into arrays.
template <int Depth, class Unpack>
void mma(const char* name, MmaSlot& slot, Unpack unpack) {
  warp_collective(name, ~0u, slot, [&](MmaSlot** slots) {
    float a[16][Depth], b[Depth][8];
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      const unsigned g = lane / 4, k = lane % 4;
      const MmaSlot& s = *slots[lane];
      if constexpr (Depth == 8) {
        a[g][k] = unpack(s.a[0]), a[g + 8][k] = unpack(s.a[1]);
        a[g][k + 4] = unpack(s.a[2]), a[g + 8][k + 4] = unpack(s.a[3]);
        b[k][g] = unpack(s.b[0]), b[k + 4][g] = unpack(s.b[1]);
      } else {
        for (unsigned half = 0; half < 2; ++half) {
          const auto part = [&](uint32_t r) { return unpack(half ? r >> 16 : r & 0xFFFF); };
          const unsigned low = 2 * k + half, high = low + 8;
          a[g][low] = part(s.a[0]), a[g + 8][low] = part(s.a[1]);
          a[g][high] = part(s.a[2]), a[g + 8][high] = part(s.a[3]);
          b[low][g] = part(s.b[0]), b[high][g] = part(s.b[1]);
        }
      }
    }
    double d[16][8];
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      for (unsigned i = 0; i < 4; ++i) {
        d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = slots[lane]->c[i];
      }
    }
    add_products<Depth>(a, b, d);
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      for (unsigned i = 0; i < 4; ++i) {
        const double sum = d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
        slots[lane]->d[i] = truncate_to_float(sum);
      }
    }
  });
}

struct PendingCopy {
  char* shared;
  unsigned bytes;
  char data[16];
};

// A thread's cp.async groups; the last one is still open.
struct CopyGroups {
  std::vector<std::vector<PendingCopy>> groups{1};
};

}  // namespace emu

namespace convnormpool {

inline unsigned char* dynamic_shared_memory() {
  return reinterpret_cast<unsigned char*>(emu::state().dynamic_shared);
}

inline uint32_t shared_address(const void* pointer) { return emu::shared_address(pointer); }

namespace emulation {

template <int Depth, class Unpack>
void mma(const char* name, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
         const float (&c)[4], Unpack unpack) {
  emu::MmaSlot slot{{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}, {}};
  emu::mma<Depth>(name, slot, unpack);
  for (int i = 0; i < 4; ++i) d[i] = slot.d[i];
}

inline void ldmatrix(const char* name, uint32_t (&r)[4], uint32_t row_address, bool transposed) {
  struct Slot {
    uint32_t address, r[4];
  } slot{row_address, {}};
  emu::warp_collective(name, ~0u, slot, [&](Slot** slots) {
    for (unsigned i = 0; i < 4; ++i) {
      uint16_t matrix[8][8];
      for (unsigned row = 0; row < 8; ++row) {
        const uint32_t address = slots[8 * i + row]->address;
        if (address % 16 != 0) emu::fail("%s: address 0x%x is not aligned", name, address);
        memcpy(matrix[row], emu::shared_pointer(address), 16);
      }
      for (unsigned lane = 0; lane < emu::kWarp; ++lane) {
        const unsigned g = lane / 4, k = lane % 4;
        const uint32_t low = transposed ? matrix[2 * k][g] : matrix[g][2 * k];
        const uint32_t high = transposed ? matrix[2 * k + 1][g] : matrix[g][2 * k + 1];
        slots[lane]->r[i] = low | high << 16;
      }
    }
  });
  for (int i = 0; i < 4; ++i) r[i] = slot.r[i];
}

}  // namespace emulation

inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                             const float (&c)[4]) {
  emulation::mma<16>("mma f16", d, a, b0, b1, c, emu::from_f16);
}
inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                              const float (&c)[4]) {
  emulation::mma<16>("mma bf16", d, a, b0, b1, c, emu::from_bf16);
}

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t row_address) {
  emulation::ldmatrix("ldmatrix", r, row_address, false);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row_address) {
  emulation::ldmatrix("ldmatrix.trans", r, row_address, true);
}

inline uint32_t multiply_f16x2(uint32_t a, uint32_t b) {
  uint32_t d = 0;
  for (int i = 0; i < 32; i += 16) {
    const float product = emu::from_f16(a >> i & 0xFFFF) * emu::from_f16(b >> i & 0xFFFF);
    d |= uint32_t(__half_as_ushort(__half(product))) << i;
  }
  return d;
}

// The source is read at once, the destination is NaN until the group is waited for.
template <int Bytes>
void cp_async(void* shared, const void* global, uint32_t source_bytes = Bytes) {
  if (!emu::is_shared(shared)) emu::fail("cp.async writes to no shared memory");
  if (reinterpret_cast<uintptr_t>(shared) % Bytes != 0 ||
      reinterpret_cast<uintptr_t>(global) % Bytes != 0 || source_bytes > Bytes) {
    emu::fail("cp.async of %d bytes (%u read): misaligned or too long", Bytes, source_bytes);
  }
  emu::PendingCopy copy{static_cast<char*>(shared), Bytes, {}};
  memcpy(copy.data, global, source_bytes);
  memset(shared, 0xFF, Bytes);
  emu::per_thread<emu::CopyGroups>().groups.back().push_back(copy);
}

inline void cp_async_commit() { emu::per_thread<emu::CopyGroups>().groups.emplace_back(); }

template <int Pending>
void cp_async_wait() {
  auto& groups = emu::per_thread<emu::CopyGroups>().groups;
  while (groups.size() > size_t(Pending) + 1) {
    for (const emu::PendingCopy& c : groups.front()) memcpy(c.shared, c.data, c.bytes);
    groups.erase(groups.begin());
  }
}

inline int32_t uniform_value(int32_t x) {
  const int32_t all = int32_t(__reduce_or_sync(~0u, uint32_t(x)));
  if (all != x) emu::fail("uniform_value: lanes hold %d and others", x);
  return x;
}

inline int32_t opaque_value(int32_t x) { return x; }
inline int32_t thread_index_anew() { return int32_t(threadIdx.x); }

inline void prefetch_l1(const void*) {}
inline void prefetch_l2(const void*) {}

inline void barrier_sync(int id, int threads) {
  emu::named_barrier(unsigned(id), unsigned(threads), true);
}
inline void barrier_arrive(int id, int threads) {
  emu::named_barrier(unsigned(id), unsigned(threads), false);
}

inline uint32_t load_acquire(const uint32_t* global) { return *global; }
inline void grid_dependency_wait() {}
inline void grid_dependency_launch() {}

}  // namespace convnormpool

#endif  // CONVNORMPOOL_PTX_CUH
