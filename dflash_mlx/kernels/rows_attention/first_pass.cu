// Attention of a few rows over a cache, the first of two passes: the body of a CUDA kernel, by the algorithm of
// first_pass.metal.
//
// A warp computes 16 rows. Its matrix units take numbers of type T, so weights are rounded to it, as in MLX's own
// products. multiply_accumulate is in the header (passes.py).

constexpr float NEVER = -3e38f;
// A tile has so many eights of keys. A thread reads some of them before it stores the first: reading takes long.
constexpr int EIGHTS = KEYS * (D / 8), AT_ONCE = 4;
struct alignas(4) Two { T at[2]; };
struct alignas(16) Eight { T at[8]; };
// Eight more, so that lanes that read at once use different banks.
__shared__ Eight key_tile[KEYS][D / 8 + 1];
__shared__ Eight value_tile[KEYS][D / 8 + 1];

const int heads = q_shape[1], rows = q_shape[2], groups = k_shape[1], length = k_shape[2], share = heads / groups;
const int threads = blockDim.x, splits = (length + POSITIONS - 1) / POSITIONS;
const int split = blockIdx.y, start = split * POSITIONS;
const int end = start + POSITIONS < length ? start + POSITIONS : length;
const int answer = blockIdx.z / groups, group = blockIdx.z % groups;

// Of a matrix of 16 rows and 8 columns a lane has two columns, in this row and in the one 8 further.
const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
const int kind = static_cast<int>(settings[1]);
const float scale = settings[0] * 1.44269504089f;  // for powers of two

auto load = [](const T* from, int64_t step) {
  if (step == 1 && reinterpret_cast<size_t>(from) % 16 == 0) return *reinterpret_cast<const Eight*>(from);
  Eight eight;
  for (int i = 0; i < 8; i++) eight.at[i] = from[i * step];
  return eight;
};
auto word = [](T first, T second) {
  const Two two = {{first, second}};
  uint32_t word;
  memcpy(&word, &two, 4);
  return word;
};

const T* keys = k + answer * k_strides[0] + group * k_strides[1];
const T* values = v + answer * v_strides[0] + group * v_strides[1];
int query[2], head[2], last[2];
bool used[2];
#pragma unroll
for (int i = 0; i < 2; i++) {
  const int place = (blockIdx.x * threads + threadIdx.x / 32 * 32) / 2 + row + 8 * i;
  used[i] = place < rows * share;
  query[i] = place / share, head[i] = group * share + place % share;
  last[i] = kind == CAUSAL ? length - rows + query[i] : length - 1;
}
uint32_t queries[D / 16][4];
#pragma unroll
for (int j = 0; j < D / 16; j++)
  #pragma unroll
  for (int i = 0; i < 4; i++) {
    const int r = i % 2, d = 16 * j + column + 8 * (i / 2);
    const T* from = q + answer * q_strides[0] + head[r] * q_strides[1] + query[r] * q_strides[2] + d * q_strides[3];
    queries[j][i] = used[r] ? word(from[0], from[q_strides[3]]) : 0;
  }

float highest[2] = {NEVER, NEVER}, total[2] = {0, 0}, sums_of[D / 8][4];
#pragma unroll
for (int d = 0; d < D / 8; d++)
  for (int i = 0; i < 4; i++) sums_of[d][i] = 0;

for (int first = start; first < end; first += KEYS) {
  for (int begin = threadIdx.x; begin < EIGHTS; begin += AT_ONCE * threads) {
    Eight key[AT_ONCE], value[AT_ONCE];
    #pragma unroll
    for (int a = 0; a < AT_ONCE; a++) {
      const int i = begin + a * threads, n = first + i / (D / 8), d = i % (D / 8) * 8;
      for (int j = 0; j < 8; j++) key[a].at[j] = value[a].at[j] = static_cast<T>(0.0f);
      if (i < EIGHTS && n < end) {
        key[a] = load(keys + n * k_strides[2] + d * k_strides[3], k_strides[3]);
        value[a] = load(values + n * v_strides[2] + d * v_strides[3], v_strides[3]);
      }
    }
    #pragma unroll
    for (int a = 0; a < AT_ONCE; a++) {
      const int i = begin + a * threads;
      if (i < EIGHTS) {
        key_tile[i / (D / 8)][i % (D / 8)] = key[a];
        value_tile[i / (D / 8)][i % (D / 8)] = value[a];
      }
    }
  }
  __syncthreads();

  float scores[KEYS / 8][4];
  #pragma unroll
  for (int t = 0; t < KEYS / 8; t++) {
    for (int i = 0; i < 4; i++) scores[t][i] = 0;
    #pragma unroll
    for (int j = 0; j < D / 16; j++) {
      uint32_t right[2];
      for (int i = 0; i < 2; i++)
        right[i] = reinterpret_cast<const uint32_t*>(key_tile[8 * t + row][2 * j + i].at)[column / 2];
      multiply_accumulate<BRAIN>(scores[t], queries[j], right);
    }
  }

  // Scores become weights, relative to the highest score so far. Four lanes that follow each other have a row.
  float top[2] = {highest[0], highest[1]}, weight[2] = {0, 0}, before[2];
  #pragma unroll
  for (int t = 0; t < KEYS / 8; t++)
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const int n = first + 8 * t + column + i % 2, r = i / 2;
      const bool seen = used[r] && n <= last[r] &&
          (kind != MASK || mask[answer * mask_strides[0] + query[r] * mask_strides[2] + n * mask_strides[3]]);
      scores[t][i] = seen ? scores[t][i] * scale : NEVER;
      top[r] = max(top[r], scores[t][i]);
    }
  #pragma unroll
  for (int r = 0; r < 2; r++)
    for (int distance = 1; distance < 4; distance *= 2)
      top[r] = max(top[r], __shfl_xor_sync(0xffffffff, top[r], distance));
  #pragma unroll
  for (int t = 0; t < KEYS / 8; t++)
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      scores[t][i] = scores[t][i] == NEVER ? 0 : exp2f(scores[t][i] - top[i / 2]);
      weight[i / 2] += scores[t][i];
    }
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    for (int distance = 1; distance < 4; distance *= 2) weight[r] += __shfl_xor_sync(0xffffffff, weight[r], distance);
    before[r] = exp2f(highest[r] - top[r]);
    highest[r] = top[r];
    total[r] = total[r] * before[r] + weight[r];
  }
  #pragma unroll
  for (int d = 0; d < D / 8; d++)
    for (int i = 0; i < 4; i++) sums_of[d][i] *= before[i / 2];
  #pragma unroll
  for (int t = 0; t < KEYS / 8; t += 2) {
    uint32_t left[4];
    for (int i = 0; i < 4; i++)
      left[i] = word(static_cast<T>(scores[t + i / 2][i % 2 * 2]), static_cast<T>(scores[t + i / 2][i % 2 * 2 + 1]));
    #pragma unroll
    for (int d = 0; d < D / 8; d++) {
      T numbers[4];
      for (int i = 0; i < 4; i++) numbers[i] = value_tile[8 * t + column + i % 2 + i / 2 * 8][d].at[row];
      const uint32_t right[2] = {word(numbers[0], numbers[1]), word(numbers[2], numbers[3])};
      multiply_accumulate<BRAIN>(sums_of[d], left, right);
    }
  }
  __syncthreads();
}

#pragma unroll
for (int r = 0; r < 2; r++)
  if (used[r]) {
    const int64_t at = ((static_cast<int64_t>(answer) * rows + query[r]) * heads + head[r]) * splits + split;
    if (column == 0) marks[2 * at] = highest[r], marks[2 * at + 1] = total[r];
    #pragma unroll
    for (int d = 0; d < D / 8; d++)
      for (int i = 0; i < 2; i++) sums[at * D + 8 * d + column + i] = sums_of[d][2 * r + i];
  }
