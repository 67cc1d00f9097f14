// Few rows times one matrix or several: the body of a CUDA kernel (few_rows_linear.py launches it, and gives `sizes`,
// `matrices` and `products`, which have as many items as there are matrices).
//
// A block of threads computes 16 rows of 8 columns of one product. Its warps share the depth in turns, 32 places each, in
// an order that depends on the depth alone. A lane reads 8 places of a column and of two rows at once; two steps of the
// matrix units then take four of these each. In which order places are added is free, if rows and columns agree on it.
// multiply_accumulate is in the header (matrix_units.cu).

constexpr int WARPS = THREADS / 32;
struct alignas(16) Eight { T at[8]; };
__shared__ float partial[WARPS][16][8];

int block = blockIdx.x, which = 0;
while (block >= (sizes[which] + 7) / 8) block -= (sizes[which++] + 7) / 8;
const T* w = matrices[which];
T* product = products[which];
const int columns = sizes[which], first_column = 8 * block, first_row = 16 * blockIdx.y;
const int depth = w0_shape[1];
int rows = 1;
for (int i = 0; i + 1 < DIMENSIONS; i++) rows *= x_shape[i];

const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
const int line = lane / 4, chunk = lane % 4;

auto load = [&](const T* from, int line_of_it, int lines, int at) {
  Eight eight;
  for (int j = 0; j < 8; j++) eight.at[j] = static_cast<T>(0.0f);
  if (line_of_it >= lines) return eight;
  from += static_cast<int64_t>(line_of_it) * depth + at;
  if ((reinterpret_cast<size_t>(from) & 15) == 0) return *reinterpret_cast<const Eight*>(from);
  for (int j = 0; j < 8; j++) eight.at[j] = from[j];
  return eight;
};

float sums[4] = {0, 0, 0, 0};
#pragma unroll 4
for (int start = 32 * warp; start < depth; start += 32 * WARPS) {
  const int at = start + 8 * chunk;
  const Eight weights = load(w, first_column + line, columns, at);
  const Eight numbers[2] = {load(x, first_row + line, rows, at), load(x, first_row + line + 8, rows, at)};
  #pragma unroll
  for (int s = 0; s < 8; s += 4) {
    uint32_t left[4], right[2];
    for (int i = 0; i < 2; i++) {
      for (int eight = 0; eight < 2; eight++) memcpy(&left[eight + 2 * i], &numbers[eight].at[s + 2 * i], 4);
      memcpy(&right[i], &weights.at[s + 2 * i], 4);
    }
    multiply_accumulate<BRAIN>(sums, left, right);
  }
}

// The warps' parts are added in the same order each time.
for (int i = 0; i < 4; i++) partial[warp][line + 8 * (i / 2)][2 * chunk + i % 2] = sums[i];
__syncthreads();
for (int i = threadIdx.x; i < 16 * 8; i += THREADS) {
  const int row = first_row + i / 8, column = first_column + i % 8;
  float sum = 0;
  for (int part = 0; part < WARPS; part++) sum += partial[part][i / 8][i % 8];
  if (row < rows && column < columns) product[static_cast<int64_t>(row) * columns + column] = static_cast<T>(sum);
}
