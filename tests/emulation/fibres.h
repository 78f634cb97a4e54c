// The core of the emulator (emulator.h says how it is used): fibres, the state of a block and of
// emulated instructions, shared memory, and the rendezvous that all collectives are made of.
#pragma once

#include <cuda_runtime.h>
#include <link.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <tuple>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emu {

constexpr unsigned kWarp = 32;
constexpr unsigned kWarpgroup = 128;
constexpr size_t kStackBytes = size_t{1} << 20;
constexpr uint32_t kDynamicSharedBase = 1024;
constexpr uint32_t kStaticSharedBase = 0x40000;

struct Fibre {
  void* stack_pointer = nullptr;
  ucontext_t context;
  char* stack = nullptr;
  void* fake_stack = nullptr;
  uint3 thread{};
  unsigned index = 0;
  bool exited = false;
  const char* waits_for = nullptr;
  std::vector<std::shared_ptr<void>> locals;
};

// Threads that have come to one collective and wait for the others.
struct Rendezvous {
  const char* name;
  unsigned first, count, mask, missing;
  std::vector<void*> slots;
  bool done = false;
};

struct NamedBarrier {
  unsigned arrived = 0, expected = 0;
  unsigned long generation = 0;
};

struct State {
  std::vector<Fibre> fibres;
  std::vector<char*> stacks;
  Fibre* current = nullptr;
  void* scheduler_pointer = nullptr;
  ucontext_t scheduler_context;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
  std::function<void()> body;
  std::vector<std::shared_ptr<Rendezvous>> pending;
  NamedBarrier barriers[16];
  unsigned sync_arrived = 0, alive = 0;
  int sync_predicate_or = 0, sync_predicate_and = 1, sync_predicate_count = 0;
  int sync_result_or = 0, sync_result_and = 0, sync_result_count = 0;
  unsigned long sync_generation = 0;
  unsigned long events = 0;
  std::vector<std::shared_ptr<void>> block_locals;
  char* dynamic_shared = nullptr;
  size_t dynamic_shared_bytes = 0;
  char* static_shared = nullptr;
  size_t static_shared_bytes = 0;
  std::mt19937 random{1};
};

inline State& state() {
  static State s;
  return s;
}

inline unsigned thread_index() { return state().current->index; }
inline unsigned lane_index() { return thread_index() % kWarp; }
inline void progress() { ++state().events; }

[[noreturn]] inline void list_waiting_and_abort() {
  for (const Fibre& f : state().fibres) {
    if (!f.exited && f.waits_for != nullptr) {
      fprintf(stderr, "  thread %u waits for %s\n", f.index, f.waits_for);
    }
  }
  abort();
}

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "emulation: block (%u,%u,%u)", blockIdx.x, blockIdx.y, blockIdx.z);
  if (state().current != nullptr) fprintf(stderr, " thread %u", thread_index());
  fprintf(stderr, ": ");
  vfprintf(stderr, format, arguments);
  fprintf(stderr, "\n");
  va_end(arguments);
  list_waiting_and_abort();
}

// ---- fibres

#if defined(__x86_64__)
// Saves the callee-saved registers on this stack, its pointer in *save, and goes on from `load`.
__attribute__((naked, noinline)) inline void switch_stack([[maybe_unused]] void** save,
                                                          [[maybe_unused]] void* load) {
  asm volatile(
      "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}
#endif

inline void start_switch(void** fake_stack, const void* bottom, size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(fake_stack, bottom, bytes);
#else
  (void)fake_stack, (void)bottom, (void)bytes;
#endif
}

inline void finish_switch(void* fake_stack, const void** bottom, size_t* bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, bottom, bytes);
#else
  (void)fake_stack, (void)bottom, (void)bytes;
#endif
}

inline void leave_fibre(bool for_good) {
  State& s = state();
  Fibre* f = s.current;
  start_switch(for_good ? nullptr : &f->fake_stack, s.scheduler_stack, s.scheduler_stack_bytes);
#if defined(__x86_64__)
  switch_stack(&f->stack_pointer, s.scheduler_pointer);
#else
  swapcontext(&f->context, &s.scheduler_context);
#endif
  finish_switch(f->fake_stack, nullptr, nullptr);
}

[[noreturn]] inline void fibre_main() {
  State& s = state();
  finish_switch(nullptr, &s.scheduler_stack, &s.scheduler_stack_bytes);
  s.body();
  s.current->exited = true;
  progress();
  leave_fibre(true);
  abort();
}

inline void enter_fibre(Fibre& f) {
  State& s = state();
  void* fake_stack = nullptr;
  s.current = &f;
  threadIdx = f.thread;
  start_switch(&fake_stack, f.stack, kStackBytes);
#if defined(__x86_64__)
  switch_stack(&s.scheduler_pointer, f.stack_pointer);
#else
  swapcontext(&s.scheduler_context, &f.context);
#endif
  finish_switch(fake_stack, nullptr, nullptr);
  s.current = nullptr;
}

inline void prepare_fibre(Fibre& f, char* stack) {
  f.stack = stack;
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stack, kStackBytes);
#endif
#if defined(__x86_64__)
  void** top = reinterpret_cast<void**>(stack + kStackBytes) - 2;
  *top = reinterpret_cast<void*>(&fibre_main);
  f.stack_pointer = top - 6;
  memset(f.stack_pointer, 0, 6 * sizeof(void*));
#else
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = stack;
  f.context.uc_stack.ss_size = kStackBytes;
  f.context.uc_link = nullptr;
  makecontext(&f.context, reinterpret_cast<void (*)()>(&fibre_main), 0);
#endif
}

inline void yield() { leave_fibre(false); }

template <class Predicate>
void wait_until(const char* name, Predicate predicate) {
  Fibre* f = state().current;
  f->waits_for = name;
  while (!predicate()) yield();
  f->waits_for = nullptr;
  progress();
}

// ---- state of emulated instructions

inline unsigned next_local_id() {
  static unsigned id = 0;
  return id++;
}

template <class T>
T& local_of(std::vector<std::shared_ptr<void>>& locals) {
  static const unsigned id = next_local_id();
  if (locals.size() <= id) locals.resize(id + 1);
  if (!locals[id]) locals[id] = std::make_shared<T>();
  return *static_cast<T*>(locals[id].get());
}

template <class T>
T& per_thread() {
  return local_of<T>(state().current->locals);
}

template <class T>
T& per_block() {
  return local_of<T>(state().block_locals);
}

// ---- shared memory

inline uint32_t shared_address(const void* pointer) {
  const State& s = state();
  const char* p = static_cast<const char*>(pointer);
  if (p >= s.dynamic_shared && p <= s.dynamic_shared + s.dynamic_shared_bytes) {
    return kDynamicSharedBase + uint32_t(p - s.dynamic_shared);
  }
  if (p >= s.static_shared && p < s.static_shared + s.static_shared_bytes) {
    return kStaticSharedBase + uint32_t(p - s.static_shared);
  }
  fail("%p is no address in shared memory", pointer);
}

inline char* shared_pointer(uint32_t address) {
  const State& s = state();
  if (address >= kStaticSharedBase && address - kStaticSharedBase < s.static_shared_bytes) {
    return s.static_shared + (address - kStaticSharedBase);
  }
  if (address >= kDynamicSharedBase && address - kDynamicSharedBase <= s.dynamic_shared_bytes) {
    return s.dynamic_shared + (address - kDynamicSharedBase);
  }
  fail("0x%x is no address in shared memory", address);
}

inline bool is_shared(const void* pointer) {
  const State& s = state();
  const char* p = static_cast<const char*>(pointer);
  return (p >= s.dynamic_shared && p < s.dynamic_shared + s.dynamic_shared_bytes) ||
         (p >= s.static_shared && p < s.static_shared + s.static_shared_bytes);
}

// Static shared arrays are thread-local variables of the program: together they are its TLS block.
inline int find_static_shared(dl_phdr_info* info, size_t, void*) {
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type == PT_TLS && info->dlpi_tls_data != nullptr) {
      state().static_shared = static_cast<char*>(info->dlpi_tls_data);
      state().static_shared_bytes = info->dlpi_phdr[i].p_memsz;
    }
  }
  return 1;  // the first object is the program itself
}

__attribute__((no_sanitize("address"))) inline void poison(char* p, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) static_cast<volatile char*>(p)[i] = char(0xFF);
}

// ---- collectives

// Whether this thread may enter another collective than one that is pending among some of the same
// threads: other lanes of its warp may, and other warps of its warpgroup.
inline bool may_differ(const Rendezvous& r, unsigned count, unsigned mask) {
  const unsigned warp = thread_index() / kWarp * kWarp;
  if (r.count == kWarp) return count == kWarp ? (r.mask & mask) == 0 : r.first != warp;
  if (count != kWarp) return false;
  for (unsigned i = 0; i < kWarp; ++i) {
    if (r.slots[warp - r.first + i] != nullptr) return false;
  }
  return true;
}

inline void join(const char* name, unsigned first, unsigned count, unsigned mask, void* slot,
                 const std::function<void(void**)>& compute) {
  State& s = state();
  const unsigned place = thread_index() - first;
  std::shared_ptr<Rendezvous> meeting;
  for (auto& r : s.pending) {
    if (r->first >= first + count || r->first + r->count <= first) continue;
    if (r->first == first && r->count == count && r->mask == mask && !strcmp(r->name, name)) {
      meeting = r;
    } else if (!may_differ(*r, count, mask)) {
      fail("calls %s (mask %08x) while others wait in %s (mask %08x)", name, mask, r->name,
           r->mask);
    }
  }
  if (!meeting) {
    const unsigned missing = count == kWarp ? unsigned(__builtin_popcount(mask)) : count;
    meeting = std::make_shared<Rendezvous>(
        Rendezvous{name, first, count, mask, missing, std::vector<void*>(count, nullptr)});
    s.pending.push_back(meeting);
    for (unsigned i = 0; i < count; ++i) {
      if (count == kWarp && !(mask >> i & 1)) continue;
      if (first + i >= s.fibres.size() || s.fibres[first + i].exited) {
        fail("%s (mask %08x) names thread %u, which is not there", name, mask, first + i);
      }
    }
  }
  if (meeting->slots[place] != nullptr) fail("%s entered twice", name);
  meeting->slots[place] = slot;
  progress();
  if (--meeting->missing == 0) {
    compute(meeting->slots.data());
    meeting->done = true;
    for (size_t i = 0; i < s.pending.size(); ++i) {
      if (s.pending[i] == meeting) s.pending.erase(s.pending.begin() + long(i));
    }
  } else {
    wait_until(name, [&] { return meeting->done; });
  }
}

template <class Slot, class F>
void warp_collective(const char* name, unsigned mask, Slot& slot, F compute) {
  if (!(mask >> lane_index() & 1)) fail("%s: mask %08x does not name this lane", name, mask);
  join(name, thread_index() / kWarp * kWarp, kWarp, mask, &slot,
       [&](void** slots) { compute(reinterpret_cast<Slot**>(slots)); });
}

template <class Slot, class F>
void warpgroup_collective(const char* name, Slot& slot, F compute) {
  join(name, thread_index() / kWarpgroup * kWarpgroup, kWarpgroup, ~0u, &slot,
       [&](void** slots) { compute(reinterpret_cast<Slot**>(slots)); });
}

inline void sync_block(int predicate) {
  State& s = state();
  const unsigned long generation = s.sync_generation;
  ++s.sync_arrived;
  s.sync_predicate_or |= predicate != 0;
  s.sync_predicate_and &= predicate != 0;
  s.sync_predicate_count += predicate != 0;
  progress();
  // Exited threads don't count, and one may exit while others wait.
  wait_until("__syncthreads", [&] {
    if (s.sync_generation != generation) return true;
    unsigned alive = 0;
    for (const Fibre& f : s.fibres) alive += !f.exited;
    if (s.sync_arrived < alive) return false;
    s.sync_result_or = s.sync_predicate_or;
    s.sync_result_and = s.sync_predicate_and;
    s.sync_result_count = s.sync_predicate_count;
    s.sync_arrived = 0;
    s.sync_predicate_or = 0, s.sync_predicate_and = 1, s.sync_predicate_count = 0;
    ++s.sync_generation;
    return true;
  });
}

// bar.sync and bar.arrive: `threads` threads meet at barrier `id`.
inline void named_barrier(unsigned id, unsigned threads, bool wait) {
  if (id >= 16 || threads % kWarp != 0) fail("barrier %u of %u threads is not legal", id, threads);
  State& s = state();
  NamedBarrier& b = s.barriers[id];
  if (b.arrived != 0 && b.expected != threads) {
    fail("barrier %u: %u threads expected here, %u elsewhere", id, threads, b.expected);
  }
  b.expected = threads;
  const unsigned long generation = b.generation;
  progress();
  if (++b.arrived == threads) {
    b.arrived = 0;
    ++b.generation;
  } else if (wait) {
    wait_until("a named barrier", [&] { return b.generation != generation; });
  }
}

}  // namespace emu
