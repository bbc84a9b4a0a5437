// csrc/block_team.cuh and csrc/merge.cuh as the GPU runs them, on emulated thread blocks (emulated/cuda_runtime.h).
#include <vector>

#include "block_team.cuh"
#include "merge.cuh"

using namespace spec_mask;

namespace {

template <int THREADS>
void plan_block(const PlanShape& shape, const int32_t* seq_lens, const int32_t* query_start_loc,
                int32_t num_requests, int32_t* buffer, uint32_t seed) {
  static typename BlockTeam<THREADS>::Exchange exchange;
  std::vector<int32_t> scratch(plan_scratch_elements(shape), -1);
  const PlanArrays arrays = plan_arrays(shape, buffer);
  emulated::launch(1, {THREADS, 1, 1}, seed, [&] {
    BlockTeam<THREADS> team{&exchange};
    make_plan(team, shape, seq_lens, query_start_loc, num_requests, arrays, scratch.data());
  });
}

template <int HEAD_DIM>
void merge_blocks(const MergeLaunch& m, const float* partial_o, const float* partial_lse,
                  const PlanHeader* header, const MergeRow* rows, float* o, float* lse, int32_t num_rows,
                  int32_t num_heads, uint32_t seed) {
  const auto launch = [&](auto kernel) {
    emulated::launch(m.blocks, {kMergeThreads, 1, 1}, seed,
                     [&] { kernel(partial_o, partial_lse, header, rows, o, lse, num_rows, num_heads); });
  };
  if (m.warps == 16) launch(merge_partials<HEAD_DIM, 16, float>);
  if (m.warps == 4) launch(merge_partials<HEAD_DIM, 4, float>);
  if (m.warps == 1) launch(merge_partials<HEAD_DIM, 1, float>);
}

}  // namespace

extern "C" {

const char* fault() { return emulated::last_fault.c_str(); }

int32_t plan_on_block(const PlanShape* shape, const int32_t* seq_lens, const int32_t* query_start_loc,
                      int32_t num_requests, int32_t* buffer, int32_t threads, uint32_t seed) {
  return emulated::guarded([&] {
    const auto plan = threads == 256   ? plan_block<256>
                      : threads == 512 ? plan_block<512>
                                       : plan_block<1024>;
    plan(*shape, seq_lens, query_start_loc, num_requests, buffer, seed);
  });
}

void merge_shape(int64_t pairs, int32_t num_sms, int32_t* out) {
  const MergeLaunch m = merge_launch(pairs, num_sms);
  out[0] = m.warps;
  out[1] = m.blocks;
}

int32_t merge(int32_t head_dim, int32_t warps, int32_t blocks, const float* partial_o, const float* partial_lse,
              int32_t direct, const MergeRow* rows, float* o, float* lse, int32_t num_rows, int32_t num_heads,
              uint32_t seed) {
  PlanHeader header{};
  header.direct = direct;
  return emulated::guarded([&] {
    const auto kernel = head_dim == 64    ? merge_blocks<64>
                        : head_dim == 96  ? merge_blocks<96>
                        : head_dim == 128 ? merge_blocks<128>
                                          : merge_blocks<256>;
    kernel(MergeLaunch{warps, blocks}, partial_o, partial_lse, &header, rows, o, lse, num_rows, num_heads, seed);
  });
}

// The sum of 0..63 in both warps by way of shared memory, and three ways to get it wrong, which the
// emulation must notice: 1 a lane that is named has returned, 2 half a warp waits at a barrier and half for
// the warp, 3 a missing barrier: the sum is wrong.
int32_t emulate(int32_t wrong, uint32_t seed, int32_t* sum) {
  return emulated::guarded([&] {
    static int32_t words[64];
    emulated::launch(1, {64, 1, 1}, seed, [&] {
      const int32_t i = threadIdx.x;
      if (wrong == 1 && i == 5) return;
      words[i] = i;
      if (wrong == 2 && i % 32 < 16) (void)__shfl_sync(0xffffffffu, i, 0);
      if (wrong != 3) __syncthreads();
      const int32_t total = __reduce_add_sync(0xffffffffu, words[i] + words[63 - i]);
      if (i % 32 == 0) sum[i / 32] = total / 2;
      __syncthreads();
      words[i] = -1;
    });
  });
}
}
