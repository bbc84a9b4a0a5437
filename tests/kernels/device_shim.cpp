// csrc/block_team.cuh and csrc/merge.cuh as the GPU runs them, on emulated thread blocks (emulated/cuda_runtime.h).
#include <vector>

#include "block_team.cuh"
#include "merge.cuh"

using namespace spec_mask;

namespace {

template <int THREADS>
void plan_block(const PlanShape& shape, const int32_t* seq_lens, const int32_t* query_start_loc,
                int32_t num_requests, int32_t* buffer, int32_t blocks, uint32_t seed) {
  static typename BlockTeam<THREADS>::Exchange exchange;
  // One for each block, as shared memory is.
  const int32_t elements = plan_scratch_elements(shape);
  std::vector<int32_t> scratch(static_cast<size_t>(blocks) * elements, -1);
  const PlanArrays arrays = plan_arrays(shape, buffer);
  emulated::launch(blocks, {THREADS, 1, 1}, seed, [&] {
    BlockTeam<THREADS> team{&exchange};
    make_plan(team, shape, seq_lens, query_start_loc, num_requests, arrays,
              scratch.data() + static_cast<size_t>(blockIdx.x) * elements);
  });
}

template <int HEAD_DIM>
void merge_blocks(const MergeLaunch& m, const float* partial_o, const float* partial_lse,
                  const PlanHeader* header, const MergeRow* rows, float* o, float* lse, int32_t num_rows,
                  int32_t num_heads, uint32_t seed) {
  const auto kernel = merge_kernel<HEAD_DIM, float>(m);
  emulated::launch(m.blocks, {static_cast<uint32_t>(32 * m.block_warps), 1, 1}, seed,
                   [&] { kernel(partial_o, partial_lse, header, rows, o, lse, num_rows, num_heads); });
}

}  // namespace

extern "C" {

const char* fault() { return emulated::last_fault.c_str(); }

int32_t plan_on_block(const PlanShape* shape, const int32_t* seq_lens, const int32_t* query_start_loc,
                      int32_t num_requests, int32_t* buffer, int32_t threads, int32_t blocks, uint32_t seed) {
  return emulated::guarded([&] {
    const auto plan = threads == 128 ? plan_block<128> : plan_block<512>;
    plan(*shape, seq_lens, query_start_loc, num_requests, buffer, blocks, seed);
  });
}

void plan_shape(int32_t max_requests, int32_t* out) {
  const PlanLaunch launch = plan_launch(max_requests);
  out[0] = launch.threads;
  out[1] = launch.blocks;
}

void merge_shape(const PlanShape* shape, int64_t pairs, int32_t head_dim, int32_t* out) {
  const MergeLaunch m = merge_launch(*shape, pairs, head_dim);
  out[0] = m.warps;
  out[1] = m.block_warps;
  out[2] = m.blocks;
}

int32_t merge(int32_t head_dim, int32_t warps, int32_t block_warps, int32_t blocks, const float* partial_o, const float* partial_lse,
              int32_t direct, const MergeRow* rows, float* o, float* lse, int32_t num_rows, int32_t num_heads,
              uint32_t seed) {
  PlanHeader header{};
  header.direct = direct;
  return emulated::guarded([&] {
    const auto kernel = head_dim == 64    ? merge_blocks<64>
                        : head_dim == 96  ? merge_blocks<96>
                        : head_dim == 128 ? merge_blocks<128>
                                          : merge_blocks<256>;
    kernel(MergeLaunch{warps, block_warps, blocks}, partial_o, partial_lse, &header, rows, o, lse, num_rows, num_heads, seed);
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
