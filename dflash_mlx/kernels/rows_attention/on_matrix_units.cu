// Attention of a few rows over a cache on the matrix units: the body of a CUDA kernel (on_matrix_units.py).
//
// A block of threads computes 16 rows of the query heads that share a head of keys, over all positions or, IN_PARTS,
// over PART of them; put_together.cu then puts the parts together. Its warps take turns of KEYS positions each, at
// places that depend on nothing else, and each keeps its queries and its weighted values in registers. Keys and values
// come from memory the way the matrix units want them: a lane reads numbers that lie side by side, since the order in
// which places are added is free, if both factors agree on it. What the GPU does itself is in the header
// (matrix_units.cu).

// The highest score of a row that has seen nothing yet, and the score of a position that is not seen.
constexpr float NEVER = -1e38f, HIDDEN = -3e38f;
constexpr int WARPS = THREADS / 32;
// Whether a thread has room for keys and values that it needs later: then it asks for them before it computes.
constexpr bool EARLY = D <= 128;
constexpr int KEYS = D <= 64 ? 32 : 16;
// Numbers of a key, and of a value, that a lane reads at once.
constexpr int OF_KEY = D % 32 == 0 ? 8 : 4, OF_VALUE = D % 64 == 0 ? 8 : D % 32 == 0 ? 4 : 2;
constexpr int KEY_READS = D / (4 * OF_KEY), VALUE_READS = D / (8 * OF_VALUE);
// Blocks of eight columns that the warps put together at once.
constexpr int TOGETHER = D % 32 == 0 ? 4 : 2;
struct alignas(4) Two { T at[2]; };
struct alignas(2 * OF_KEY) Key { T at[OF_KEY]; };
struct alignas(2 * OF_VALUE) Value { T at[OF_VALUE]; };
struct alignas(16) Sixteen { uint32_t at[4]; };
// What the rows see, in bits, of PART positions at once.
// One word more, so that lanes that read at once use different banks.
__shared__ uint32_t seen[16][PART / 32 + 1];
__shared__ float tops[WARPS][16];
__shared__ float totals[WARPS][16];
__shared__ float parts[WARPS][16][8 * TOGETHER + 1];

const int heads = q_shape[1], rows = q_shape[2], groups = k_shape[1], length = k_shape[2], share = heads / groups;
const int first_row = 16 * blockIdx.x, group = blockIdx.y, warp = threadIdx.x / 32;
// The part of the positions that the block looks at, of so many.
const int number = IN_PARTS ? (length + PART - 1) / PART : 1, answer = blockIdx.z / number;
const int from = blockIdx.z % number * PART, until = IN_PARTS ? min(from + PART, length) : length;
// Of a matrix of 16 rows and 8 columns a lane has two columns, in this row and in the one 8 further.
const int row = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
const int kind = static_cast<int>(settings[1]);
const float scale = settings[0] * 1.44269504089f;  // for powers of two

auto word = [](T first, T second) {
  const Two two = {{first, second}};
  uint32_t word;
  memcpy(&word, &two, 4);
  return word;
};

const T* keys = k + answer * k_strides[0] + group * k_strides[1];
const T* values = v + answer * v_strides[0] + group * v_strides[1];
const uint32_t key_step = k_strides[2], value_step = v_strides[2];
const bool keys_lie =
    k_strides[3] == 1 && key_step % OF_KEY == 0 && reinterpret_cast<size_t>(keys) % sizeof(Key) == 0;
const bool values_lie =
    v_strides[3] == 1 && value_step % OF_VALUE == 0 && reinterpret_cast<size_t>(values) % sizeof(Value) == 0;
auto one_by_one = [](auto& numbers, const T* from, int64_t step) {
  T each[sizeof(numbers) / sizeof(T)];
  #pragma unroll 1
  for (int i = 0; i < sizeof(numbers) / sizeof(T); i++) each[i] = from[i * step];
  memcpy(&numbers, each, sizeof(numbers));
};

uint32_t queries[D / 16][4];
#pragma unroll
for (int r = 0; r < 2; r++) {
  const int place = first_row + row + 8 * r, head = group * share + place % share;
  const T* from = q + answer * q_strides[0] + head * q_strides[1] + place / share * q_strides[2];
  #pragma unroll
  for (int j = 0; j < D / 16; j++)
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const int d = j / (OF_KEY / 4) * 4 * OF_KEY + quarter * OF_KEY + j % (OF_KEY / 4) * 4 + 2 * i;
      queries[j][r + 2 * i] = place < rows * share ? word(from[d * q_strides[3]], from[(d + 1) * q_strides[3]]) : 0;
    }
}

// The row of which a thread puts into bits what it sees: the last position it may see, and its mask.
const int r = threadIdx.x / (THREADS / 16), query = (first_row + r) / share;
const int last = first_row + r >= rows * share ? -1 : kind == CAUSAL ? length - rows + query : length - 1;
const bool* shown = mask + (kind == MASK && last >= 0 ? answer * mask_strides[0] + query * mask_strides[2] : 0);

float highest[2] = {NEVER, NEVER}, total[2] = {0, 0}, sums[D / 8][4];
#pragma unroll
for (int j = 0; j < D / 8; j++)
  for (int i = 0; i < 4; i++) sums[j][i] = 0;

// Numbers that do not lie side by side are read one by one, in a loop of its own: each warp is at another place of a
// loop, which is several times as fast where all of it fits into the cache for instructions. The types differ in size
// only.
struct Side { char of[1]; };
struct Apart { char of[2]; };
auto attend = [&](auto how) {
  constexpr bool LIE = sizeof(how) == sizeof(Side);
  // A position after the last one is not seen; the last one is read in its place.
  auto read_key = [&](Key& key, int n, int d) {
    const T* from = keys + static_cast<uint32_t>(min(n, length - 1)) * key_step;
    if constexpr (LIE) key = *reinterpret_cast<const Key*>(from + d);
    else one_by_one(key, from + d * k_strides[3], k_strides[3]);
  };
  auto read_value = [&](Value& value, int n, int d) {
    const T* from = values + static_cast<uint32_t>(min(n, length - 1)) * value_step;
    if constexpr (LIE) value = *reinterpret_cast<const Value*>(from + d);
    else one_by_one(value, from + d * v_strides[3], v_strides[3]);
  };

  for (int begin = from; begin < until; begin += PART) {
    const int end = min(begin + PART, until), words = (end - begin + 31) / 32;
    __syncthreads();
    for (int i = threadIdx.x % (THREADS / 16); i < words; i += THREADS / 16) {
      // How many of these 32 positions the row may see.
      const int n = begin + 32 * i, most = min(last - n + 1, 32);
      uint32_t bits = most <= 0 ? 0 : most == 32 ? 0xffffffff : (1u << most) - 1;
      if (kind == MASK && bits != 0) {
        const bool* from = shown + n * mask_strides[3];
        uint32_t told = 0;
        if (most == 32 && mask_strides[3] == 1 && reinterpret_cast<size_t>(from) % 16 == 0) {
          const Sixteen two[2] = {reinterpret_cast<const Sixteen*>(from)[0], reinterpret_cast<const Sixteen*>(from)[1]};
          // The lowest bits of four bytes, side by side.
          for (int j = 0; j < 8; j++) told |= (two[j / 4].at[j % 4] * 0x01020408u >> 24 & 15) << (4 * j);
        } else {
          for (int j = 0; j < most; j++) told |= static_cast<uint32_t>(from[j * mask_strides[3]]) << j;
        }
        bits &= told;
      }
      seen[r][i] = bits;
    }
    __syncthreads();

    // Which of the positions of a turn a lane's two rows see.
    auto seen_at = [&](int first, int r) {
      const uint32_t bits = seen[row + 8 * r][(first - begin) / 32];
      return KEYS == 32 ? bits : bits >> (first - begin) % 32 & 0xffff;
    };
    auto next_turn = [&](int first) {
      while (first < end && !__any_sync(0xffffffff, (seen_at(first, 0) | seen_at(first, 1)) != 0))
        first += KEYS * WARPS;
      return first;
    };
    Key key[KEYS / 8][KEY_READS];
    auto read_keys = [&](int first) {
      #pragma unroll
      for (int t = 0; t < KEYS / 8; t++)
        #pragma unroll
        for (int g = 0; g < KEY_READS; g++) read_key(key[t][g], first + 8 * t + row, 4 * OF_KEY * g + OF_KEY * quarter);
    };

    int first = next_turn(begin + KEYS * warp);
    if (EARLY && first < end) read_keys(first);
    while (first < end) {
      Value value[VALUE_READS][KEYS / 4];
      auto read_values = [&](int g) {
        #pragma unroll
        for (int i = 0; i < KEYS / 4; i++)
          read_value(value[g][i], first + i / 2 * 8 + 2 * quarter + i % 2, OF_VALUE * (8 * g + row));
      };
      if (EARLY) {
        #pragma unroll
        for (int g = 0; g < VALUE_READS; g++) read_values(g);
      } else {
        read_keys(first);
      }
      float scores[KEYS / 8][4];
      #pragma unroll
      for (int t = 0; t < KEYS / 8; t++) {
        for (int i = 0; i < 4; i++) scores[t][i] = 0;
        #pragma unroll
        for (int j = 0; j < D / 16; j++) {
          const T* from = &key[t][j / (OF_KEY / 4)].at[j % (OF_KEY / 4) * 4];
          const uint32_t right[2] = {word(from[0], from[1]), word(from[2], from[3])};
          multiply_accumulate<BRAIN>(scores[t], queries[j], right);
        }
      }
      const uint32_t bits[2] = {seen_at(first, 0) >> (2 * quarter), seen_at(first, 1) >> (2 * quarter)};
      const int next = next_turn(first + KEYS * WARPS);
      if (EARLY && next < end) read_keys(next);

      // Scores become weights, relative to the highest score so far. Four lanes that follow each other have a row.
      float top[2] = {highest[0], highest[1]}, weight[2] = {0, 0};
      #pragma unroll
      for (int t = 0; t < KEYS / 8; t++)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          scores[t][i] = bits[i / 2] >> (8 * t + i % 2) & 1 ? scores[t][i] * scale : HIDDEN;
          top[i / 2] = max(top[i / 2], scores[t][i]);
        }
      #pragma unroll
      for (int distance = 1; distance < 4; distance *= 2)
        for (int r = 0; r < 2; r++) top[r] = max(top[r], __shfl_xor_sync(0xffffffff, top[r], distance));
      #pragma unroll
      for (int t = 0; t < KEYS / 8; t++)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          scores[t][i] = power_of_two(scores[t][i] - top[i / 2]);
          weight[i / 2] += scores[t][i];
        }
      // Where no row has a new highest score, all would be multiplied by 1.
      if (__any_sync(0xffffffff, top[0] != highest[0] || top[1] != highest[1])) {
        const float before[2] = {power_of_two(highest[0] - top[0]), power_of_two(highest[1] - top[1])};
        #pragma unroll
        for (int j = 0; j < D / 8; j++)
          for (int i = 0; i < 4; i++) sums[j][i] *= before[i / 2];
        for (int r = 0; r < 2; r++) total[r] *= before[r], highest[r] = top[r];
      }
      // The lanes' parts are added at the end.
      for (int r = 0; r < 2; r++) total[r] += weight[r];

      #pragma unroll
      for (int s = 0; s < KEYS / 16; s++) {
        // The units take weights of type T: what that leaves of a weight is multiplied, too.
        uint32_t large[4], small[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          const float one = scores[2 * s + i / 2][i % 2 * 2], other = scores[2 * s + i / 2][i % 2 * 2 + 1];
          const T of_one = static_cast<T>(one), of_other = static_cast<T>(other);
          large[i] = word(of_one, of_other);
          const float of_these[2] = {one - static_cast<float>(of_one), other - static_cast<float>(of_other)};
          small[i] = word(static_cast<T>(of_these[0]), static_cast<T>(of_these[1]));
        }
        #pragma unroll
        for (int g = 0; g < VALUE_READS; g++) {
          if (!EARLY) read_values(g);
          #pragma unroll
          for (int j = 0; j < OF_VALUE; j++) {
            const Value* of = &value[g][4 * s];
            const uint32_t right[2] = {word(of[0].at[j], of[1].at[j]), word(of[2].at[j], of[3].at[j])};
            multiply_accumulate<BRAIN>(sums[g * OF_VALUE + j], large, right);
            multiply_accumulate<BRAIN>(sums[g * OF_VALUE + j], small, right);
          }
        }
      }
      first = next;
    }
  }
};
if (keys_lie && values_lie) attend(Side());
else attend(Apart());

// The lanes' parts, and then the warps', are put together in the same order each time.
#pragma unroll
for (int r = 0; r < 2; r++) {
  for (int distance = 1; distance < 4; distance *= 2) total[r] += __shfl_xor_sync(0xffffffff, total[r], distance);
  if (quarter == 0) tops[warp][row + 8 * r] = highest[r], totals[warp][row + 8 * r] = total[r];
}
__syncthreads();
#pragma unroll
for (int r = 0; r < 2; r++) {
  float top = NEVER;
  for (int i = 0; i < WARPS; i++) top = max(top, tops[i][row + 8 * r]);
  const float share_of_it = exp2f(highest[r] - top);
  #pragma unroll
  for (int j = 0; j < D / 8; j++)
    for (int i = 0; i < 2; i++) sums[j][2 * r + i] *= share_of_it;
}
constexpr int COLUMNS = 8 * TOGETHER;
#pragma unroll
for (int begin = 0; begin < D / 8; begin += TOGETHER) {
  __syncthreads();
  #pragma unroll
  for (int j = 0; j < TOGETHER; j++)
    for (int i = 0; i < 4; i++) parts[warp][row + i / 2 * 8][8 * j + 2 * quarter + i % 2] = sums[begin + j][i];
  __syncthreads();
  for (int at = threadIdx.x; at < 16 * COLUMNS; at += THREADS) {
    const int r = at / COLUMNS, column = at % COLUMNS, place = first_row + r, j = begin + column / 8;
    float sum = 0, weights = 0, top = NEVER;
    for (int i = 0; i < WARPS; i++) top = max(top, tops[i][r]);
    for (int i = 0; i < WARPS; i++) {
      sum += parts[i][r][column];
      weights += totals[i][r] * exp2f(tops[i][r] - top);
    }
    const int d = 8 * OF_VALUE * (j / OF_VALUE) + OF_VALUE * (column % 8) + j % OF_VALUE;
    if (place >= rows * share) continue;
    const int head = group * share + place % share;
    const int64_t to = (static_cast<int64_t>(blockIdx.z) * rows + place / share) * heads + head;
    if (IN_PARTS) {
      out[to * (D + 2) + d] = static_cast<OUT>(sum);
      if (d == 0) out[to * (D + 2) + D] = static_cast<OUT>(top), out[to * (D + 2) + D + 1] = static_cast<OUT>(weights);
    } else {
      out[to * D + d] = static_cast<OUT>(weights > 0 ? sum / weights : 0);
    }
  }
}
