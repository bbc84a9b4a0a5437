// A thread block as a planning team (planner.cuh): the collectives, with warp intrinsics.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "planner.cuh"

namespace spec_mask {

struct PlanLaunch {
  int32_t threads, blocks;
};

// The lists of a large batch are written by several blocks, each of which plans all of it: one would have to pass over
// them several times. A small batch has more barrier than work, and a barrier of 4 warps is the cheaper one.
inline PlanLaunch plan_launch(int32_t max_requests) {
  return {max_requests <= 32 ? 128 : 512, max_requests <= 256 ? 4 : 8};
}

template <int THREADS>
struct BlockTeam {
  static constexpr int kWarps = THREADS / 32;
  // One slot per warp. Plain arrays: shared variables may not have constructors.
  struct Exchange {
    int64_t tokens[kWarps];
    int4 rest[kWarps];
    int2 pairs[kWarps];
  };
  Exchange* exchange;  // shared

  __device__ int32_t rank() const { return threadIdx.x; }
  __device__ int32_t size() const { return THREADS; }
  __device__ int32_t group() const { return threadIdx.x / 32; }
  __device__ int32_t groups() const { return kWarps; }
  __device__ int32_t lane() const { return threadIdx.x % 32; }
  __device__ int32_t lanes() const { return 32; }
  __device__ void sync() const { __syncthreads(); }

  __device__ int32_t part() const { return blockIdx.x; }
  __device__ int32_t parts() const { return gridDim.x; }

  __device__ int32_t from_lane(int32_t v, int32_t lane) const {
    return __shfl_sync(0xffffffffu, v, lane);
  }
  __device__ int32_t group_sum(int32_t v) const { return __reduce_add_sync(0xffffffffu, v); }

  __device__ Choice group_min(const Choice& v) const {
    const uint32_t high = static_cast<uint32_t>(v.key >> 32), low = static_cast<uint32_t>(v.key);
    const uint32_t min_high = __reduce_min_sync(0xffffffffu, high);
    const uint32_t rest = high == min_high ? low : 0xffffffffu;
    const uint32_t min_low = __reduce_min_sync(0xffffffffu, rest);
    // Keys differ, so this is one lane; the first of them where the low half is all ones.
    const uint32_t owners = __ballot_sync(0xffffffffu, high == min_high && low == min_low);
    return Choice{static_cast<uint64_t>(min_high) << 32 | min_low,
                  __shfl_sync(0xffffffffu, v.chunk, __ffs(static_cast<int>(owners)) - 1)};
  }

  __device__ static Totals warp_reduce(Totals v) {
    // Two sums of 32 bits, each one instruction; of 64 bits there is none. A q tile counts fewer than 2^24 tokens and
    // tiles have 31 bits, so the upper sum has them too, and the lower one is of 32 times 24 bits.
    const uint32_t low = __reduce_add_sync(0xffffffffu, static_cast<uint32_t>(v.tokens) & 0xffffffu);
    const uint32_t high = __reduce_add_sync(0xffffffffu, static_cast<uint32_t>(v.tokens >> 24));
    v.tokens = (static_cast<int64_t>(high) << 24) + low;
    v.tiles = __reduce_add_sync(0xffffffffu, v.tiles);
    v.longest = __reduce_max_sync(0xffffffffu, v.longest);
    v.rows = __reduce_max_sync(0xffffffffu, v.rows);
    v.status = static_cast<int32_t>(__reduce_or_sync(0xffffffffu, v.status));
    return v;
  }

  // Two steps of the same warp reduction: within each warp, then over the warps' results. Called once: a
  // second call would need a barrier in front.
  __device__ Totals reduce(Totals v) const {
    v = warp_reduce(v);
    if (lane() == 0) {
      exchange->tokens[group()] = v.tokens;
      exchange->rest[group()] = make_int4(v.tiles, v.longest, v.rows, v.status);
    }
    __syncthreads();
    Totals all;
    if (lane() < kWarps) {
      all.tokens = exchange->tokens[lane()];
      const int4 rest = exchange->rest[lane()];
      all.tiles = rest.x;
      all.longest = rest.y;
      all.rows = rest.z;
      all.status = rest.w;
    }
    return warp_reduce(all);
  }

  __device__ static Pair warp_scan(Pair v, int32_t lane) {
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int32_t ctas = __shfl_up_sync(0xffffffffu, v.ctas, offset);
      const int32_t rows = __shfl_up_sync(0xffffffffu, v.rows, offset);
      if (lane >= offset) v = Pair{v.ctas + ctas, v.rows + rows};
    }
    return v;
  }

  __device__ Pair exclusive_scan(Pair v, Pair* total) const {
    const Pair inclusive = warp_scan(v, lane());
    __syncthreads();
    if (lane() == 31) exchange->pairs[group()] = make_int2(inclusive.ctas, inclusive.rows);
    __syncthreads();
    Pair warp{0, 0};
    if (lane() < kWarps) warp = Pair{exchange->pairs[lane()].x, exchange->pairs[lane()].y};
    total->ctas = group_sum(warp.ctas);
    total->rows = group_sum(warp.rows);
    const bool earlier = lane() < group();
    const Pair before{group_sum(earlier ? warp.ctas : 0), group_sum(earlier ? warp.rows : 0)};
    return Pair{before.ctas + inclusive.ctas - v.ctas, before.rows + inclusive.rows - v.rows};
  }
};

}  // namespace spec_mask
