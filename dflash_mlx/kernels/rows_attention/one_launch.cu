// Attention of a few rows over a cache in one launch: the body of a CUDA kernel (one_launch.py launches it).
//
// A block of threads computes one query head of ROWS rows of one sequence. Threads in groups of D / 8 share a key: 8
// numbers each. One kernel serves all kinds of masks, because compiling one takes seconds the first time.

constexpr int LANES = D / 8;
constexpr int GROUPS = THREADS / LANES;
constexpr int WARPS = THREADS / 32;
struct alignas(16) Eight { T at[8]; };
__shared__ float weights[ROWS][MOST_KEYS];
__shared__ float warp_values[ROWS][WARPS];
__shared__ float warp_outputs[WARPS][D];

const int head = blockIdx.x, first_row = blockIdx.y * ROWS, sequence = blockIdx.z;
const float scale = settings[0] * 1.44269504089f;
const int rows = q_shape[2], keys = k_shape[2];
const int kind = static_cast<int>(settings[1]);
const int kv_head = head / (q_shape[1] / k_shape[1]);
const int part = threadIdx.x % LANES, group = threadIdx.x / LANES;
const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

// A few rows wait for memory more than for anything else. So a thread asks for its numbers of several keys at once, and
// uses the first when it has asked for the last. Where a key is not wanted, the first one is read in its place. Which way
// to load is decided outside of the loops: at each key, that takes a thread half again as many registers.
auto load_eight = [](const T* from, int64_t) { return *reinterpret_cast<const Eight*>(from); };
auto load_each = [](const T* from, int64_t step) {
  Eight eight;
  for (int j = 0; j < 8; j++) eight.at[j] = from[j * step];
  return eight;
};
auto can_load_eight = [](const T* from, int64_t stride, int64_t step) {
  return step == 1 && stride % 8 == 0 && (reinterpret_cast<size_t>(from) & 15) == 0;
};
// Where there are fewer rows, the last one is computed again.
auto row_at = [&](int r) { return first_row + r < rows ? first_row + r : rows - 1; };

const T* from_queries = q + sequence * q_strides[0] + head * q_strides[1] + 8 * part * q_strides[3];
const T* all_keys = k + sequence * k_strides[0] + kv_head * k_strides[1] + 8 * part * k_strides[3];
const T* all_values = v + sequence * v_strides[0] + kv_head * v_strides[1] + 8 * part * v_strides[3];
// Where there is no mask, there is a single true in its place.
const int64_t mask_step = kind == MASK ? mask_strides[3] : 0, mask_row = kind == MASK ? mask_strides[2] : 0;
const bool* all_sees = mask + (kind == MASK ? sequence * mask_strides[0] : 0);

// Scores are in base 2. What weighs how much is relative to the highest score so far.
constexpr float NEVER = -3e38f;
Eight several[AT_ONCE], one[1];
float query[ROWS][8], sums[ROWS][8], highest[ROWS], total[ROWS];
for (int r = 0; r < ROWS; r++) {
  for (int j = 0; j < 8; j++) {
    query[r][j] = static_cast<float>(from_queries[row_at(r) * q_strides[2] + j * q_strides[3]]);
    sums[r][j] = 0;
  }
  highest[r] = NEVER;
  total[r] = 0;
}

for (int begin = 0; begin < keys; begin += MOST_KEYS) {
  const int count = keys - begin < MOST_KEYS ? keys - begin : MOST_KEYS;
  const T* from_keys = all_keys + begin * k_strides[2];
  const T* from_values = all_values + begin * v_strides[2];
  const bool* sees = all_sees + begin * mask_step;

  float best[ROWS];
  for (int r = 0; r < ROWS; r++) best[r] = highest[r];
  auto score = [&](auto load, auto& held) {
    constexpr int N = sizeof(held) / sizeof(Eight);
    for (int first = group; first - group < count; first += N * GROUPS) {
      bool seen[ROWS][N];
      for (int u = 0; u < N; u++) {
        const int i = first + u * GROUPS, at = i < count ? i : 0;
        bool wanted = false;
        for (int r = 0; r < ROWS; r++) {
          const int row = row_at(r), last = kind == CAUSAL ? keys - rows + row : keys - 1;
          const bool shown = sees[row * mask_row + at * mask_step];
          seen[r][u] = shown & (i < count) & (begin + i <= last);
          wanted |= seen[r][u];
        }
        held[u] = load(from_keys + (wanted ? i : 0) * k_strides[2], k_strides[3]);
      }
      for (int u = 0; u < N; u++) {
        const int i = first + u * GROUPS;
        float key[8];
        for (int j = 0; j < 8; j++) key[j] = static_cast<float>(held[u].at[j]);
        for (int r = 0; r < ROWS; r++) {
          float sum = 0;
          for (int j = 0; j < 8; j++) sum += query[r][j] * key[j];
          for (int distance = LANES / 2; distance > 0; distance /= 2)
            sum += __shfl_xor_sync(0xffffffff, sum, distance);
          sum = seen[r][u] ? sum * scale : NEVER;
          if (part == 0 && i < count) weights[r][i] = sum;
          best[r] = max(best[r], sum);
        }
      }
    }
  };
  if (can_load_eight(from_keys, k_strides[2], k_strides[3])) score(load_eight, several);
  else score(load_each, one);
  for (int r = 0; r < ROWS; r++) {
    for (int distance = 16; distance > 0; distance /= 2)
      best[r] = max(best[r], __shfl_xor_sync(0xffffffff, best[r], distance));
    if (lane == 0) warp_values[r][warp] = best[r];
  }
  __syncthreads();
  for (int r = 0; r < ROWS; r++) {
    for (int i = 0; i < WARPS; i++) best[r] = max(best[r], warp_values[r][i]);
    const float before = exp2f(highest[r] - best[r]);
    highest[r] = best[r];
    total[r] *= before;
    for (int j = 0; j < 8; j++) sums[r][j] *= before;
  }
  __syncthreads();

  for (int r = 0; r < ROWS; r++) {
    float own = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) {
      weights[r][i] = exp2f(weights[r][i] - highest[r]);
      own += weights[r][i];
    }
    for (int distance = 16; distance > 0; distance /= 2) own += __shfl_xor_sync(0xffffffff, own, distance);
    if (lane == 0) warp_values[r][warp] = own;
  }
  __syncthreads();
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < WARPS; i++) total[r] += warp_values[r][i];

  auto add = [&](auto load, auto& held) {
    constexpr int N = sizeof(held) / sizeof(Eight);
    for (int first = group; first < count; first += N * GROUPS) {
      float weight[ROWS][N];
      for (int u = 0; u < N; u++) {
        const int i = first + u * GROUPS;
        bool wanted = false;
        for (int r = 0; r < ROWS; r++) {
          weight[r][u] = i < count ? weights[r][i] : 0;
          wanted |= weight[r][u] != 0;
        }
        held[u] = load(from_values + (wanted ? i : 0) * v_strides[2], v_strides[3]);
      }
      for (int u = 0; u < N; u++) {
        float value[8];
        for (int j = 0; j < 8; j++) value[j] = static_cast<float>(held[u].at[j]);
        for (int r = 0; r < ROWS; r++)
          for (int j = 0; j < 8; j++)
            if (weight[r][u] != 0) sums[r][j] += weight[r][u] * value[j];
      }
    }
  };
  if (can_load_eight(from_values, v_strides[2], v_strides[3])) add(load_eight, several);
  else add(load_each, one);
  __syncthreads();
}

for (int r = 0; r < ROWS; r++) {
  for (int j = 0; j < 8; j++) {
    for (int distance = LANES; distance < 32; distance *= 2)
      sums[r][j] += __shfl_xor_sync(0xffffffff, sums[r][j], distance);
    if (lane < LANES) warp_outputs[warp][8 * part + j] = sums[r][j];
  }
  __syncthreads();
  for (int d = threadIdx.x; d < D && first_row + r < rows; d += THREADS) {
    float sum = 0;
    for (int i = 0; i < WARPS; i++) sum += warp_outputs[i][d];
    out[((static_cast<int64_t>(sequence) * rows + first_row + r) * q_shape[1] + head) * D + d] =
        static_cast<T>(sum / total[r]);
  }
  __syncthreads();
}
