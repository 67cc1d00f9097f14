// Attention of a few rows over a cache in one launch: the body of a CUDA kernel (one_launch.py launches it).
//
// A block of threads computes one query head of one row of one sequence. Threads in groups of D / 8 share a key: 8
// numbers each. One kernel serves all kinds of masks, because compiling one takes seconds the first time.

constexpr int LANES = D / 8;
constexpr int GROUPS = THREADS / LANES;
constexpr int WARPS = THREADS / 32;
struct alignas(16) Eight { T at[8]; };
__shared__ float weights[MOST_KEYS];
__shared__ float warp_values[WARPS];
__shared__ float warp_outputs[WARPS][D];

const int head = blockIdx.x, row = blockIdx.y, sequence = blockIdx.z;
const float scale = settings[0] * 1.44269504089f;
const int rows = q_shape[2], keys = k_shape[2];
const int kind = static_cast<int>(settings[1]);
const int last = kind == CAUSAL ? keys - rows + row : keys - 1;
const int kv_head = head / (q_shape[1] / k_shape[1]);
const int part = threadIdx.x % LANES, group = threadIdx.x / LANES;
const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

// A single row waits for memory more than for anything else. So a thread asks for its numbers of several keys at once, and
// uses the first when it has asked for the last. Where a key is not wanted, the first one is read in its place.
auto load_eight = [](const T* from, int64_t) { return *reinterpret_cast<const Eight*>(from); };
auto load_each = [](const T* from, int64_t step) {
  Eight eight;
  for (int j = 0; j < 8; j++) eight.at[j] = from[j * step];
  return eight;
};
auto can_load_eight = [](const T* from, int64_t stride, int64_t step) {
  return step == 1 && stride % 8 == 0 && (reinterpret_cast<size_t>(from) & 15) == 0;
};

const T* from_query = q + sequence * q_strides[0] + head * q_strides[1] + row * q_strides[2] + 8 * part * q_strides[3];
float query[8];
for (int j = 0; j < 8; j++) query[j] = static_cast<float>(from_query[j * q_strides[3]]);
const T* all_keys = k + sequence * k_strides[0] + kv_head * k_strides[1] + 8 * part * k_strides[3];
const T* all_values = v + sequence * v_strides[0] + kv_head * v_strides[1] + 8 * part * v_strides[3];
// Where there is no mask, there is a single true in its place.
const int64_t mask_step = kind == MASK ? mask_strides[3] : 0;
const bool* all_sees = mask + (kind == MASK ? sequence * mask_strides[0] + row * mask_strides[2] : 0);

Eight several[AT_ONCE], one[1];
constexpr float NEVER = -3e38f;
float highest_of_all = NEVER, total_of_all = 0, sums_of_all[8] = {0, 0, 0, 0, 0, 0, 0, 0};
for (int begin = 0; begin < keys; begin += MOST_KEYS) {
  const int count = keys - begin < MOST_KEYS ? keys - begin : MOST_KEYS;
  const T* from_keys = all_keys + begin * k_strides[2];
  const T* from_values = all_values + begin * v_strides[2];
  const bool* sees = all_sees + begin * mask_step;

  // Scores, in base 2, and the highest of them.
  float highest = NEVER;
  auto score = [&](auto load, auto& held) {
    constexpr int N = sizeof(held) / sizeof(Eight);
    for (int first = group; first - group < count; first += N * GROUPS) {
      bool seen[N];
      for (int u = 0; u < N; u++) {
        const int i = first + u * GROUPS;
        const bool shown = sees[(i < count ? i : 0) * mask_step];
        seen[u] = shown & (i < count) & (begin + i <= last);
      }
      for (int u = 0; u < N; u++)
        held[u] = load(from_keys + (seen[u] ? first + u * GROUPS : 0) * k_strides[2], k_strides[3]);
      for (int u = 0; u < N; u++) {
        const int i = first + u * GROUPS;
        float sum = 0;
        for (int j = 0; j < 8; j++) sum += query[j] * static_cast<float>(held[u].at[j]);
        for (int distance = LANES / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
        sum = seen[u] ? sum * scale : NEVER;
        if (part == 0 && i < count) weights[i] = sum;
        highest = max(highest, sum);
      }
    }
  };
  if (can_load_eight(from_keys, k_strides[2], k_strides[3])) score(load_eight, several);
  else score(load_each, one);
  for (int distance = 16; distance > 0; distance /= 2)
    highest = max(highest, __shfl_xor_sync(0xffffffff, highest, distance));
  if (lane == 0) warp_values[warp] = highest;
  __syncthreads();
  for (int i = 0; i < WARPS; i++) highest = max(highest, warp_values[i]);
  __syncthreads();

  float total = 0;
  for (int i = threadIdx.x; i < count; i += THREADS) {
    weights[i] = exp2f(weights[i] - highest);
    total += weights[i];
  }
  for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(0xffffffff, total, distance);
  if (lane == 0) warp_values[warp] = total;
  __syncthreads();
  total = 0;
  for (int i = 0; i < WARPS; i++) total += warp_values[i];

  float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  auto add = [&](auto load, auto& held) {
    constexpr int N = sizeof(held) / sizeof(Eight);
    for (int first = group; first < count; first += N * GROUPS) {
      float weight[N];
      for (int u = 0; u < N; u++) {
        const int i = first + u * GROUPS;
        weight[u] = i < count ? weights[i] : 0;
        held[u] = load(from_values + (weight[u] != 0 ? i : 0) * v_strides[2], v_strides[3]);
      }
      for (int u = 0; u < N; u++)
        for (int j = 0; j < 8; j++)
          if (weight[u] != 0) sums[j] += weight[u] * static_cast<float>(held[u].at[j]);
    }
  };
  if (can_load_eight(from_values, v_strides[2], v_strides[3])) add(load_eight, several);
  else add(load_each, one);
  // Together with the parts before, whose weights were relative to another highest score.
  const float top = max(highest_of_all, highest);
  const float before = exp2f(highest_of_all - top), now = exp2f(highest - top);
  total_of_all = total_of_all * before + total * now;
  for (int j = 0; j < 8; j++) sums_of_all[j] = sums_of_all[j] * before + sums[j] * now;
  highest_of_all = top;
  __syncthreads();
}
for (int j = 0; j < 8; j++) {
  for (int distance = LANES; distance < 32; distance *= 2)
    sums_of_all[j] += __shfl_xor_sync(0xffffffff, sums_of_all[j], distance);
  if (lane < LANES) warp_outputs[warp][8 * part + j] = sums_of_all[j];
}
__syncthreads();
for (int d = threadIdx.x; d < D; d += THREADS) {
  float sum = 0;
  for (int i = 0; i < WARPS; i++) sum += warp_outputs[i][d];
  out[((static_cast<int64_t>(sequence) * rows + row) * q_shape[1] + head) * D + d] =
      static_cast<T>(sum / total_of_all);
}
