// Thread blocks on the CPU: enough of CUDA to run csrc/*.cuh that has no inline assembly, compiled with g++.
//
// The threads of a block are fibers that take turns, and change turns only where CUDA lets threads wait for each
// other. Which of them goes first is drawn anew at every turn: code that lacks a barrier reads what is not
// there yet, sooner or later. What CUDA leaves undefined ends the run with a message: a warp function whose
// mask names a lane that has returned, or threads that wait for one that never comes.
//
// Shared variables are static ones, so one block runs at a time.
//
// With EMULATED_BESIDE_CUDA the toolkit's own headers come along, for code that needs its types.
#pragma once

#if defined(EMULATED_BESIDE_CUDA)
#include_next <cuda_runtime.h>
#undef __launch_bounds__
#undef __grid_constant__
#define __launch_bounds__(...)
#define __grid_constant__
#endif

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#if !defined(EMULATED_BESIDE_CUDA)
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct dim3 {
  uint32_t x = 1, y = 1, z = 1;
};
struct int2 {
  int32_t x, y;
};
struct int4 {
  int32_t x, y, z, w;
};
inline int2 make_int2(int32_t x, int32_t y) { return {x, y}; }
inline int4 make_int4(int32_t x, int32_t y, int32_t z, int32_t w) { return {x, y, z, w}; }
#endif

inline dim3 threadIdx, blockIdx, gridDim, blockDim;

namespace emulated {

constexpr size_t kStack = 256 * 1024;

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Block {
 public:
  // Runs every thread of one block to its end.
  Block(uint32_t threads, std::mt19937& order, const std::function<void()>& body)
      : threads_(threads), warps_((threads + 31) / 32), order_(order), body_(body), live_(threads) {
    for (uint32_t w = 0; w < warps_.size(); ++w) warps_[w].live = std::min(32u, threads - 32 * w);
  }

  void run() {
    current = this;
    for (uint32_t t = 0; t < threads_.size(); ++t) {
      Thread& thread = threads_[t];
      thread.stack = std::make_unique_for_overwrite<char[]>(kStack);
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.get();
      thread.context.uc_stack.ss_size = kStack;
      thread.context.uc_link = nullptr;
      makecontext(&thread.context, &Block::start, 0);
    }
    std::vector<uint32_t> ready;
    while (live_ > 0) {
      ready.clear();
      for (uint32_t t = 0; t < threads_.size(); ++t) {
        if (!threads_[t].ended && !waits(t)) ready.push_back(t);
      }
      if (ready.empty()) throw Fault("threads wait for others that never come");
      std::shuffle(ready.begin(), ready.end(), order_);
      for (uint32_t t : ready) {
        running_ = t;
        threadIdx.x = t % blockDim.x;
        threadIdx.y = t / blockDim.x % blockDim.y;
        threadIdx.z = t / (blockDim.x * blockDim.y);
        resume(threads_[t]);
        if (!error_.empty()) throw Fault(error_);
      }
    }
  }

  void block_barrier() {
    Thread& thread = threads_[running_];
    thread.wait = Wait::block;
    thread.generation = barrier_;
    ++arrived_;
    pass_block();
    pause();
    thread.wait = Wait::none;
  }

  // Every lane's word, once all live lanes have come here.
  const uint64_t* exchange(uint32_t mask, uint64_t word) {
    Thread& thread = threads_[running_];
    Warp& warp = warps_[running_ / 32];
    if (mask != 0xffffffffu || warp.live != 32) fail("a warp function names a lane that is not there");
    const uint32_t generation = warp.generation;
    uint64_t* slots = warp.slots[generation % 2];
    slots[running_ % 32] = word;
    thread.wait = Wait::warp;
    thread.generation = generation;
    if (++warp.arrived == 32) {
      warp.arrived = 0;
      ++warp.generation;
    }
    pause();
    thread.wait = Wait::none;
    return slots;
  }

  uint32_t lane() const { return running_ % 32; }

  // An asynchronous copy of this thread, and the end of a group of them. A group is done at once or when it is
  // waited for, whichever is drawn: code that does not wait reads what is not there yet, and code that reuses the place
  // too early overwrites what others still read.
  void copy_later(std::function<void()> copy) { threads_[running_].copies.push_back(std::move(copy)); }
  void commit_copies() {
    Thread& thread = threads_[running_];
    thread.groups.push_back(std::move(thread.copies));
    thread.copies.clear();
    if (order_() % 2 == 0) finish(thread.groups.back());
  }
  void wait_copies(size_t but) {
    auto& groups = threads_[running_].groups;
    while (groups.size() > but) {
      finish(groups.front());
      groups.pop_front();
    }
  }

  static inline Block* current = nullptr;

 private:
  enum class Wait { none, block, warp };
  using Copies = std::vector<std::function<void()>>;
  static void finish(Copies& copies) {
    for (const auto& copy : copies) copy();
    copies.clear();
  }

  struct Thread {
    Copies copies;              // not yet in a group
    std::deque<Copies> groups;  // not yet waited for
    ucontext_t context;  // where it starts
    jmp_buf place;       // where it waits
    bool started = false;
    std::unique_ptr<char[]> stack;
    Wait wait = Wait::none;
    uint32_t generation = 0;
    bool ended = false;
  };
  struct Warp {
    uint64_t slots[2][32];
    uint32_t generation = 0, arrived = 0, live = 32;
  };

  bool waits(uint32_t t) const {
    const Thread& thread = threads_[t];
    if (thread.wait == Wait::block) return thread.generation == barrier_;
    if (thread.wait == Wait::warp) return thread.generation == warps_[t / 32].generation;
    return false;
  }

  // A barrier counts the threads that have not returned (PTX ISA, barrier.sync, since sm_70).
  void pass_block() {
    if (arrived_ == live_ && arrived_ > 0) {
      arrived_ = 0;
      ++barrier_;
    }
  }

  // Threads change turns by _longjmp: swapcontext() would ask the kernel for the signal mask each time.
  __attribute__((noinline)) void resume(Thread& thread) {
    if (_setjmp(scheduler_) != 0) return;
    if (thread.started) _longjmp(thread.place, 1);
    thread.started = true;
    setcontext(&thread.context);
  }

  __attribute__((noinline)) void pause() {
    if (_setjmp(threads_[running_].place) == 0) _longjmp(scheduler_, 1);
  }

  void fail(const char* what) {
    error_ = what;
    pause();
  }

  static void start() {
    Block& block = *current;
    block.body_();
    block.threads_[block.running_].ended = true;
    Warp& warp = block.warps_[block.running_ / 32];
    --warp.live;
    if (warp.arrived > 0) block.error_ = "a thread returned while its warp waits for it";
    --block.live_;
    block.pass_block();
    _longjmp(block.scheduler_, 1);
  }

  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::mt19937& order_;
  const std::function<void()>& body_;
  jmp_buf scheduler_;
  uint32_t running_ = 0, live_, arrived_ = 0, barrier_ = 0;
  std::string error_;
};

// A kernel launch: blocks one after the other, in any order.
inline void launch(uint32_t blocks, dim3 threads, uint32_t seed, const std::function<void()>& body) {
  std::mt19937 order(seed);
  std::vector<uint32_t> turns(blocks);
  for (uint32_t b = 0; b < blocks; ++b) turns[b] = b;
  std::shuffle(turns.begin(), turns.end(), order);
  gridDim.x = blocks;
  blockDim = threads;
  for (uint32_t b : turns) {
    blockIdx.x = b;
    Block(threads.x * threads.y * threads.z, order, body).run();
  }
}

// Runs a test's launches: 0, or 1 and what the fault was.
inline std::string last_fault;
template <typename Body>
int32_t guarded(Body body) {
  try {
    body();
    return 0;
  } catch (const Fault& fault) {
    last_fault = fault.what();
    return 1;
  }
}

template <typename T>
const uint64_t* exchange(uint32_t mask, T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return Block::current->exchange(mask, word);
}

template <typename T>
T read(const uint64_t* slots, uint32_t lane) {
  T value;
  std::memcpy(&value, &slots[lane], sizeof(T));
  return value;
}

template <typename T, typename Combine>
T fold(uint32_t mask, T value, Combine combine) {
  const uint64_t* slots = exchange(mask, value);
  T all = read<T>(slots, 0);
  for (uint32_t lane = 1; lane < 32; ++lane) all = combine(all, read<T>(slots, lane));
  return all;
}

}  // namespace emulated

inline void __syncwarp() { (void)emulated::exchange(0xffffffffu, 0); }
inline void __syncthreads() { emulated::Block::current->block_barrier(); }

template <typename T>
T __shfl_sync(uint32_t mask, T value, int lane) {
  return emulated::read<T>(emulated::exchange(mask, value), static_cast<uint32_t>(lane) % 32);
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int lanes) {
  const uint32_t self = emulated::Block::current->lane();
  return emulated::read<T>(emulated::exchange(mask, value), self ^ static_cast<uint32_t>(lanes));
}
template <typename T>
T __shfl_up_sync(uint32_t mask, T value, uint32_t delta) {
  const uint32_t self = emulated::Block::current->lane();
  return emulated::read<T>(emulated::exchange(mask, value), self >= delta ? self - delta : self);
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
  const uint64_t* slots = emulated::exchange(mask, predicate);
  uint32_t bits = 0;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if (emulated::read<int>(slots, lane) != 0) bits |= 1u << lane;
  }
  return bits;
}
template <typename T>
T __reduce_add_sync(uint32_t mask, T value) {
  return emulated::fold(mask, value, [](T a, T b) { return static_cast<T>(a + b); });
}
template <typename T>
T __reduce_min_sync(uint32_t mask, T value) {
  return emulated::fold(mask, value, [](T a, T b) { return b < a ? b : a; });
}
template <typename T>
T __reduce_max_sync(uint32_t mask, T value) {
  return emulated::fold(mask, value, [](T a, T b) { return a < b ? b : a; });
}
inline uint32_t __reduce_or_sync(uint32_t mask, uint32_t value) {
  return emulated::fold(mask, value, [](uint32_t a, uint32_t b) { return a | b; });
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    word |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return word;
}
inline int __ffs(int value) { return __builtin_ffs(value); }

#if defined(EMULATED_BESIDE_CUDA)
template <typename A, typename B>
auto min(A a, B b) {
  return b < a ? b : a;
}
template <typename A, typename B>
auto max(A a, B b) {
  return a < b ? b : a;
}
template <typename T>
T __ldg(const T* pointer) {
  return *pointer;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
#endif
