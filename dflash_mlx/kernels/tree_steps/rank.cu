// The best tokens by each row of scores, the best first, and their log-probabilities: the body of a CUDA kernel (launches.py).
//
// A block of threads goes through a row once, each thread through every THREADS-th score. Then the threads' best are
// compared K times, and each time the thread that had the best one looks for its next.

constexpr float NEVER = -3e38f, REMOVED = -1e30f;
constexpr int WARPS = THREADS / 32;
__shared__ float warp_scores[WARPS];
__shared__ int warp_columns[WARPS];
__shared__ float warp_sums[WARPS];

const int columns_in_all = scores_shape[1];
const T* row = scores + static_cast<int64_t>(blockIdx.x) * columns_in_all;
const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

// The best of a thread's scores that come after one: those that are lower, or the same in a later column.
auto next_best = [&](float score, int column, float& best, int& best_column) {
  best = NEVER;
  best_column = columns_in_all;
  for (int i = threadIdx.x; i < columns_in_all; i += THREADS) {
    const float own = max(static_cast<float>(row[i]), REMOVED);
    if ((own < score || (own == score && i > column)) && own > best) {
      best = own;
      best_column = i;
    }
  }
};

float best, highest = 0, sum = 0;
int column;
next_best(-NEVER, -1, best, column);
for (int k = 0; k < K; k++) {
  float winner = best;
  int winners = column;
  for (int distance = 16; distance > 0; distance /= 2) {
    const float other = __shfl_xor_sync(0xffffffff, winner, distance);
    const int others = __shfl_xor_sync(0xffffffff, winners, distance);
    if (other > winner || (other == winner && others < winners)) {
      winner = other;
      winners = others;
    }
  }
  if (lane == 0) {
    warp_scores[warp] = winner;
    warp_columns[warp] = winners;
  }
  __syncthreads();
  for (int i = 0; i < WARPS; i++) {
    if (warp_scores[i] > winner || (warp_scores[i] == winner && warp_columns[i] < winners)) {
      winner = warp_scores[i];
      winners = warp_columns[i];
    }
  }
  if (k == 0) {
    highest = winner;
    for (int i = threadIdx.x; i < columns_in_all; i += THREADS)
      sum += expf(max(static_cast<float>(row[i]), REMOVED) - highest);
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
    if (lane == 0) warp_sums[warp] = sum;
  }
  __syncthreads();
  if (k == 0) {
    sum = 0;
    for (int i = 0; i < WARPS; i++) sum += warp_sums[i];
  }
  if (threadIdx.x == 0) {
    found[blockIdx.x * K + k] = NAMED ? token_ids[winners] : winners;
    log_probs[blockIdx.x * K + k] = winner - highest - logf(sum);
  }
  if (winners == column && k + 1 < K) next_best(winner, winners, best, column);
}
