// Merges the partial outputs of a split-KV plan.
//
// Row r of head h has `count` partial outputs with base-2 LSEs s_c; the result is their mean with
// weights 2^(s_c - max). FlashInfer has such a kernel, with an indptr per row and -5e4 standing in
// for minus infinity; this one reads the planner's MergeRow, treats a true -inf as "saw nothing"
// (so a fully masked row ends as zeros and LSE -inf and never as NaN), skips rows that belong to
// no request, leaves the output alone if the plan splits no request, and takes one warp per (row, head)
// where there are many of them and up to 16 where there are few.
//
// A captured graph launches it whatever the plan says, so what it costs when nothing is split counts: a
// block per few pairs cost 7 us at 32 requests of 8 rows and 32 heads, 28 us at 128 (H200). Now all blocks
// run at once and walk over the pairs, and end at once if there is nothing to merge.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "planner.cuh"

namespace spec_mask {

template <typename T>
struct alignas(16) Pack8 {
  T x[8];
};

// Weight of partial results with LSE s beside others of which `top` is the largest. Nothing was seen where
// s is -inf, and -inf - -inf would be NaN.
__device__ __forceinline__ float merge_weight(float s, float top) {
  return s == -INFINITY ? 0.f : exp2f(s - top);
}

struct MergeState {
  float m;       // largest LSE so far
  float d;       // sum of weights relative to m
  float acc[8];  // weighted sum of 8 output elements

  __device__ __forceinline__ void reset() {
    m = -INFINITY;
    d = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[i] = 0.f;
  }

  // Brings the sums to a maximum of at least `top`, so that several results can be added side by side: one
  // after the other, each would wait for the exponentials of the one before it.
  __device__ __forceinline__ void raise(float top) {
    top = fmaxf(top, m);
    const float weight = merge_weight(m, top);
    m = top;
    d *= weight;
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[i] *= weight;
  }

  // Adds a result with LSE `other_m` <= m.
  __device__ __forceinline__ void add(float other_m, float other_d, const float (&other)[8]) {
    const float weight = merge_weight(other_m, m);
    d += other_d * weight;
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[i] += other[i] * weight;
  }
};

// Lanes that read one partial output, 16 bytes each; at 96 elements a quarter of them idles.
constexpr int32_t merge_lanes(int32_t head_dim) { return head_dim == 96 ? 16 : head_dim / 8; }

constexpr int32_t kMergeAtOnce = 4;      // partial outputs that a lane asks for together
constexpr int32_t kMergeMostWarps = 16;  // of a pair, and of a block
constexpr int32_t kMergeWarpsPerSm = 32;  // as many as run at once, for their registers

struct MergeLaunch {
  int32_t warps;        // per pair: a power of two, up to kMergeMostWarps
  int32_t block_warps;  // kMergeMostWarps where there are many, else warps, and at least 4
  int32_t blocks;
};

// Warps of one pair have to meet, so it gets only as many as ask for all its chunks at once, and fewer if the pairs'
// warps would not run at once. (H200: 512 pairs of 16 chunks took 5.3 us with 16 warps each and 2.9 with two;
// 2048 of 4 chunks 6.1 with 4 and 2.6 with one.) How many chunks is known on the device only; it is taken from the
// grid, whose last CTAs often have no work. Few pairs are spread over all multiprocessors, as blocks of few warps.
SPEC_PLAN_FN MergeLaunch merge_launch(const PlanShape& s, int64_t pairs, int32_t head_dim) {
  const int64_t sms = max_i32(1, s.num_sms), most = sms * kMergeWarpsPerSm;
  const int32_t chunks = div_i32(s.grid, max_q_tiles(s)), at_once = 32 / merge_lanes(head_dim) * kMergeAtOnce;
  MergeLaunch m{1, kMergeMostWarps, 0};
  while (m.warps < kMergeMostWarps && 5 * m.warps * at_once < 4 * chunks && 2 * m.warps * pairs <= most) m.warps *= 2;
  if (m.warps >= 4 || 2 * m.warps * pairs <= most) m.block_warps = max_i32(4, m.warps);
  const int32_t per_block = div_i32(m.block_warps, m.warps);
  const int64_t blocks = (pairs + per_block - 1) / per_block, at_a_time = sms * div_i32(kMergeWarpsPerSm, m.block_warps);
  m.blocks = static_cast<int32_t>(blocks < at_a_time ? blocks : at_a_time);
  return m;
}

template <int HEAD_DIM, int WARPS, int BLOCK_WARPS, typename DTypeO>
__global__ void __launch_bounds__(32 * BLOCK_WARPS)
    merge_partials(const DTypeO* __restrict__ partial_o,    // [partial rows, heads, HEAD_DIM]
                   const float* __restrict__ partial_lse,   // [partial rows, heads]
                   const PlanHeader* __restrict__ header,
                   const MergeRow* __restrict__ merge_rows,  // [num_rows]
                   DTypeO* __restrict__ o,                  // [num_rows, heads, HEAD_DIM]
                   float* __restrict__ lse,                 // [num_rows, heads] or null
                   int32_t num_rows, int32_t num_heads) {
  constexpr int kLanes = merge_lanes(HEAD_DIM);
  constexpr int kPerWarp = 32 / kLanes;        // chunks a warp reads at once
  constexpr int kParallel = kPerWarp * WARPS;  // chunks read at once
  constexpr int kAtOnce = kMergeAtOnce;
  constexpr uint32_t kPairs = BLOCK_WARPS / WARPS;  // of a block at once
  static_assert(32 % kLanes == 0 && kLanes * 8 >= HEAD_DIM, "head_dim must be 64, 96, 128 or 256");
  static_assert(BLOCK_WARPS % WARPS == 0, "a pair has its warps in one block");

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t pairs = static_cast<uint32_t>(num_rows) * num_heads;  // the caller keeps it below 2^31
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // Launched while the attention kernel still runs (programmatic dependent launch): nothing that
  // it or the planner writes may be read above this line.
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  // Asked for together: one after the other they would be two trips to memory before the first partial output.
  uint32_t first = blockIdx.x * kPairs;
  const auto parts_of = [&](uint32_t pair) {
    return pair < pairs ? merge_rows[pair / num_heads] : MergeRow{0, 0};
  };
  const int32_t direct = header->direct;
  MergeRow parts = parts_of(first + warp / WARPS);
  if (direct != 0) {
    // The output is in its place and the LSEs are in its order.
    if (lse == nullptr) return;
    for (uint32_t i = blockIdx.x * (32 * BLOCK_WARPS) + threadIdx.x; i < pairs;
         i += gridDim.x * (32 * BLOCK_WARPS)) {
      if (merge_rows[i / num_heads].count != 0) lse[i] = partial_lse[i];
    }
    return;
  }

  const int part = (warp % WARPS) * kPerWarp + lane / kLanes;
  const int column = (lane % kLanes) * 8;
  const bool holds = column < HEAD_DIM;
  // The same number of turns for all warps of a block: they meet at barriers.
  for (; first < pairs; first += gridDim.x * kPairs) {
    const uint32_t pair = first + warp / WARPS, head = pair % num_heads;

    MergeState state;
    state.reset();
    for (int32_t c = part; c < parts.count; c += kAtOnce * kParallel) {
      float s[kAtOnce];
      Pack8<DTypeO> v[kAtOnce];
      float top = -INFINITY;
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        s[u] = -INFINITY;
        if (holds && c + u * kParallel < parts.count) {
          const int64_t at = static_cast<int64_t>(parts.first + c + u * kParallel) * num_heads + head;
          s[u] = partial_lse[at];
          v[u] = *reinterpret_cast<const Pack8<DTypeO>*>(partial_o + at * HEAD_DIM + column);
        } else {
#pragma unroll
          for (int i = 0; i < 8; ++i) v[u].x[i] = static_cast<DTypeO>(0.f);
        }
        top = fmaxf(top, s[u]);
      }
      state.raise(top);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = static_cast<float>(v[u].x[i]);
        state.add(s[u], 1.f, x);
      }
    }

#pragma unroll
    for (int offset = kLanes; offset < 32; offset *= 2) {
      float other[8];
      const float other_m = __shfl_xor_sync(0xffffffffu, state.m, offset);
      const float other_d = __shfl_xor_sync(0xffffffffu, state.d, offset);
#pragma unroll
      for (int i = 0; i < 8; ++i) other[i] = __shfl_xor_sync(0xffffffffu, state.acc[i], offset);
      state.raise(other_m);
      state.add(other_m, other_d, other);
    }

    if constexpr (WARPS > 1) {
      __shared__ float smem_acc[BLOCK_WARPS][HEAD_DIM];
      __shared__ float smem_m[BLOCK_WARPS], smem_d[BLOCK_WARPS];
      if (lane < kLanes && holds) {
#pragma unroll
        for (int i = 0; i < 8; ++i) smem_acc[warp][column + i] = state.acc[i];
      }
      if (lane == 0) {
        smem_m[warp] = state.m;
        smem_d[warp] = state.d;
      }
      __syncthreads();
      if (warp % WARPS == 0) {
        float top = -INFINITY;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, smem_m[warp + w]);
        state.reset();
        state.raise(top);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
          float other[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) other[i] = holds ? smem_acc[warp + w][column + i] : 0.f;
          state.add(smem_m[warp + w], smem_d[warp + w], other);
        }
      }
      // The next turn overwrites what the first warp of each pair reads here.
      __syncthreads();
    }

    if (warp % WARPS == 0 && lane < kLanes && holds && parts.count != 0) {
      const float inverse = state.d > 0.f ? 1.f / state.d : 0.f;
      Pack8<DTypeO> v;
#pragma unroll
      for (int i = 0; i < 8; ++i) v.x[i] = static_cast<DTypeO>(state.acc[i] * inverse);
      const int64_t at = static_cast<int64_t>(pair);
      *reinterpret_cast<Pack8<DTypeO>*>(o + at * HEAD_DIM + column) = v;
      if (lse != nullptr && lane == 0) {
        lse[at] = state.d > 0.f ? state.m + log2f(state.d) : -INFINITY;
      }
    }
    parts = parts_of(first + gridDim.x * kPairs + warp / WARPS);
  }
}

// The kernel of a launch.
template <int HEAD_DIM, typename DTypeO>
auto merge_kernel(const MergeLaunch& m) {
  const bool many = m.block_warps > 4;
  return m.warps == 16  ? merge_partials<HEAD_DIM, 16, 16, DTypeO>
         : m.warps == 8 ? merge_partials<HEAD_DIM, 8, 8, DTypeO>
         : m.warps == 4 ? merge_partials<HEAD_DIM, 4, 4, DTypeO>
         : m.warps == 2 ? (many ? merge_partials<HEAD_DIM, 2, 16, DTypeO> : merge_partials<HEAD_DIM, 2, 4, DTypeO>)
                        : (many ? merge_partials<HEAD_DIM, 1, 16, DTypeO> : merge_partials<HEAD_DIM, 1, 4, DTypeO>);
}

}  // namespace spec_mask
