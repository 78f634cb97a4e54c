// CUDA kernels on the host: every thread of a block is a fibre, every collective a rendezvous.
//
//   // clang-format off                 (it would sort these)
//   #include "emulator.h"             // built-ins (tests/emulation/toolkit/cuda_runtime.h)
//   #include "ptx.cuh"                // emulated instructions; its guard shuts out csrc's version
//   #include "cuda/some_kernel.cuh"   // the kernel, compiled as it is
//   emulate(dim3(blocks), dim3(threads), dynamic_shared_bytes, some_kernel<...>, arguments...);
//
// Compile: g++ -O1 -g -fno-strict-aliasing -fsanitize=address,undefined
//          -I tests/emulation -I tests/emulation/toolkit -I csrc
//
// Blocks run one after the other in a random order, the threads of a block in random order from one
// collective to the next (seed: EMULATION_SEED), so neither may be relied on. All shared memory is
// filled with 0xFF (NaN in every format) when a block starts. `__shared__` works for static arrays;
// dynamic shared memory comes from convnormpool::dynamic_shared_memory() of common/ptx.cuh, since
// `extern __shared__` can't be emulated by a macro.
//
// To emulate another instruction:
//   emu::warp_collective("name", mask, slot, f)     every lane of mask calls it with its own slot
//   (an
//       object of one type, operands and results); the last to come calls f(slots), slots[lane] the
//       pointers (null outside mask), and all go on. Lanes that disagree about name or mask, or
//       that have exited, end the program with a message.
//   emu::warpgroup_collective("name", slot, f)      the same for 128 threads, slots[0..127].
//   emu::wait_until("name", predicate)              blocks this thread until predicate() holds.
//   emu::yield()                                    one try of a spinning wait has failed.
//   emu::progress()                                 say that something others may wait for
//   happened. emu::per_thread<T>(), emu::per_block<T>()       state of an instruction,
//   default-constructed for
//                                                   each thread or block.
//   emu::shared_address(p), emu::shared_pointer(a)  generic <-> 32-bit shared addresses; dynamic
//                                                   shared memory begins at address 1024, aligned
//                                                   to 1024 (so swizzles see the right bits).
//   emu::thread_index()                             linear index of the thread in its block.
//   emu::fail(format, ...)                          ends the program, naming block and thread.
// When nothing can go on, the program ends and lists what each thread waits for.
#pragma once

#include "fibres.h"

namespace emu {

// ---- launch

inline void run_block(dim3 block, size_t shared_bytes) {
  State& s = state();
  const unsigned threads = block.x * block.y * block.z;
  s.fibres.clear();
  s.fibres.resize(threads);
  s.pending.clear();
  s.block_locals.clear();
  for (NamedBarrier& b : s.barriers) b = NamedBarrier{};
  s.sync_arrived = 0;
  // Freshly allocated for each block, so that AddressSanitizer knows its exact size.
  s.dynamic_shared = static_cast<char*>(aligned_alloc(1024, (shared_bytes + 1023) / 1024 * 1024));
  s.dynamic_shared_bytes = shared_bytes;
  poison(s.dynamic_shared, shared_bytes);
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(s.dynamic_shared + shared_bytes,
                              (shared_bytes + 1023) / 1024 * 1024 - shared_bytes);
#endif
  dl_iterate_phdr(find_static_shared, nullptr);
  poison(s.static_shared, s.static_shared_bytes);
  std::vector<unsigned> order(threads);
  for (unsigned i = 0; i < threads; ++i) {
    order[i] = i;
    Fibre& f = s.fibres[i];
    f.index = i;
    f.thread = uint3{i % block.x, i / block.x % block.y, i / (block.x * block.y)};
    if (s.stacks.size() <= i) {
      void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (stack == MAP_FAILED) fail("no memory for stacks");
      s.stacks.push_back(static_cast<char*>(stack));
    }
    prepare_fibre(f, s.stacks[i]);
  }
  const unsigned warps = (threads + kWarp - 1) / kWarp;
  std::vector<unsigned> warp_order(warps);
  for (unsigned i = 0; i < warps; ++i) warp_order[i] = i;
  for (bool any = true; any;) {
    any = false;
    const unsigned long before = s.events;
    for (unsigned i = warps; i-- > 1;) std::swap(warp_order[i], warp_order[s.random() % (i + 1)]);
    for (unsigned w : warp_order) {
      const unsigned first = w * kWarp;
      const unsigned lanes = threads - first < kWarp ? threads - first : kWarp;
      // A warp goes on alone for a random while; the others then catch up.
      for (unsigned turns = 1 + s.random() % 16; turns-- > 0;) {
        for (unsigned i = lanes; i-- > 1;) {
          std::swap(order[first + i], order[first + s.random() % (i + 1)]);
        }
        const unsigned long events = s.events;
        for (unsigned i = 0; i < lanes; ++i) {
          Fibre& f = s.fibres[order[first + i]];
          if (f.exited) continue;
          any = true;
          enter_fibre(f);
        }
        if (s.events == events) break;
      }
    }
    if (any && s.events == before) fail("deadlock");
  }
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(s.dynamic_shared, (shared_bytes + 1023) / 1024 * 1024);
#endif
  free(s.dynamic_shared);
  s.dynamic_shared = nullptr;
  s.dynamic_shared_bytes = 0;
}

}  // namespace emu

template <class... Parameters, class... Arguments>
void emulate(dim3 grid, dim3 block, size_t shared_bytes, void (*kernel)(Parameters...),
             Arguments&&... arguments) {
  emu::State& s = emu::state();
  if (const char* seed = getenv("EMULATION_SEED")) s.random.seed(unsigned(atoi(seed)));
  if (block.x * block.y * block.z > 1024) emu::fail("more than 1024 threads a block");
  const std::tuple<std::decay_t<Parameters>...> bound(std::forward<Arguments>(arguments)...);
  s.body = [&] { std::apply(kernel, bound); };
  gridDim = grid;
  blockDim = block;
  const size_t blocks = size_t(grid.x) * grid.y * grid.z;
  std::vector<size_t> order(blocks);
  for (size_t i = 0; i < blocks; ++i) order[i] = i;
  for (size_t i = blocks; i-- > 1;) std::swap(order[i], order[s.random() % (i + 1)]);
  for (size_t b : order) {
    blockIdx = uint3{unsigned(b % grid.x), unsigned(b / grid.x % grid.y),
                     unsigned(b / (size_t(grid.x) * grid.y))};
    emu::run_block(block, shared_bytes);
  }
  s.body = nullptr;
}

// ---- collectives that CUDA C++ itself offers

inline void __syncthreads() { emu::sync_block(0); }
inline int __syncthreads_or(int predicate) {
  emu::sync_block(predicate);
  return emu::state().sync_result_or;
}
inline int __syncthreads_and(int predicate) {
  emu::sync_block(predicate);
  return emu::state().sync_result_and;
}
inline int __syncthreads_count(int predicate) {
  emu::sync_block(predicate);
  return emu::state().sync_result_count;
}

inline void __syncwarp(unsigned mask = ~0u) {
  char slot = 0;
  emu::warp_collective("__syncwarp", mask, slot, [](char**) {});
}

namespace emu {

template <class T>
struct ShuffleSlot {
  T value, result;
  unsigned source;
};

// `source` is the lane to read; a lane outside the mask may not be read.
template <class T>
T shuffle(const char* name, unsigned mask, T value, unsigned source) {
  ShuffleSlot<T> slot{value, value, source};
  warp_collective(name, mask, slot, [&](ShuffleSlot<T>** slots) {
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if (slots[lane] == nullptr) continue;
      const ShuffleSlot<T>* from = slots[slots[lane]->source];
      if (from == nullptr) fail("%s: lane %u reads a lane outside the mask", name, lane);
      slots[lane]->result = from->value;
    }
  });
  return slot.result;
}

inline unsigned ballot(const char* name, unsigned mask, bool predicate) {
  struct Slot {
    bool predicate;
    unsigned result;
  } slot{predicate, 0};
  warp_collective(name, mask, slot, [](Slot** slots) {
    unsigned result = 0;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if (slots[lane] != nullptr && slots[lane]->predicate) result |= 1u << lane;
    }
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if (slots[lane] != nullptr) slots[lane]->result = result;
    }
  });
  return slot.result;
}

}  // namespace emu

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const unsigned lane = emu::lane_index(), w = unsigned(width);
  return emu::shuffle("__shfl_sync", mask, value, lane / w * w + (unsigned(source) & (w - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const unsigned lane = emu::lane_index(), w = unsigned(width), source = lane ^ unsigned(bits);
  return emu::shuffle("__shfl_xor_sync", mask, value, source / w > lane / w ? lane : source);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const unsigned lane = emu::lane_index(), w = unsigned(width);
  return emu::shuffle("__shfl_down_sync", mask, value, lane % w + delta < w ? lane + delta : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const unsigned lane = emu::lane_index(), w = unsigned(width);
  return emu::shuffle("__shfl_up_sync", mask, value, lane % w >= delta ? lane - delta : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return emu::ballot("__ballot_sync", mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
  return emu::ballot("__any_sync", mask, predicate != 0) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return emu::ballot("__all_sync", mask, predicate == 0) == 0;
}
namespace emu {

template <class T, class F>
T reduce(const char* name, unsigned mask, T value, F combine) {
  struct Slot {
    T value, result;
  } slot{value, value};
  warp_collective(name, mask, slot, [&](Slot** slots) {
    T result{};
    bool first = true;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if (slots[lane] == nullptr) continue;
      result = first ? slots[lane]->value : combine(result, slots[lane]->value);
      first = false;
    }
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if (slots[lane] != nullptr) slots[lane]->result = result;
    }
  });
  return slot.result;
}

}  // namespace emu

template <class T>
T __reduce_max_sync(unsigned mask, T value) {
  return emu::reduce("__reduce_max_sync", mask, value, [](T a, T b) { return a > b ? a : b; });
}
template <class T>
T __reduce_min_sync(unsigned mask, T value) {
  return emu::reduce("__reduce_min_sync", mask, value, [](T a, T b) { return a < b ? a : b; });
}
template <class T>
T __reduce_add_sync(unsigned mask, T value) {
  return emu::reduce("__reduce_add_sync", mask, value, [](T a, T b) { return T(a + b); });
}
template <class T>
T __reduce_or_sync(unsigned mask, T value) {
  return emu::reduce("__reduce_or_sync", mask, value, [](T a, T b) { return T(a | b); });
}
inline unsigned __activemask() { return ~0u; }
