// Few rows times one matrix or several: the body of a CUDA kernel (few_rows_linear.py launches it, and gives `sizes`,
// `matrices` and `products`, which have as many items as there are matrices).
//
// A warp computes ROW_TILES by COLUMN_TILES tiles of 16 rows and 8 columns, and goes through the depth in eight parts,
// which take turns of 32 places. A block of threads either computes such tiles once, a part in each warp (SPLIT), or has
// two by two warps that compute tiles of their own. A sum is made in the same order in both: that of each part, then all
// parts. A lane reads 8 places of each tile's column and of its two rows at once; two steps of the matrix units then take
// four of these each. In which order these places are added is free, if rows and columns agree on it.
// To read a matrix fast, much of it has to be on its way at any time. Where a part is a warp's, each lane asks for what it
// will need STAGES - 1 turns ahead, which comes to places of its own in the block's memory.
// multiply_accumulate, block_memory and the copies are in the header (matrix_units.cu).

constexpr int PARTS = 8, ROWS = 16 * ROW_TILES, COLUMNS = 8 * COLUMN_TILES;
constexpr int WARPS_DOWN = SPLIT ? 1 : 2, WARPS_ACROSS = SPLIT ? 1 : 2;
constexpr int BLOCK_ROWS = ROWS * WARPS_DOWN, BLOCK_COLUMNS = COLUMNS * WARPS_ACROSS;
struct alignas(16) Eight { T at[8]; };

int block = blockIdx.x, which = 0;
while (block >= (sizes[which] + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS)
  block -= (sizes[which++] + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
const T* w = matrices[which];
T* product = products[which];
const int columns = sizes[which], depth = w0_shape[1];
int rows = 1;
for (int i = 0; i + 1 < DIMENSIONS; i++) rows *= x_shape[i];

const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
const int line = lane / 4, chunk = lane % 4;
const int first_row = BLOCK_ROWS * blockIdx.y + (SPLIT ? 0 : ROWS * (warp / WARPS_ACROSS));
const int first_column = BLOCK_COLUMNS * block + (SPLIT ? 0 : COLUMNS * (warp % WARPS_ACROSS));

// Where the lane reads. Lines beyond the last are those of the last: what comes of them is not written.
const T *row_at[2 * ROW_TILES], *column_at[COLUMN_TILES];
#pragma unroll
for (int r = 0; r < 2 * ROW_TILES; r++)
  row_at[r] = x + static_cast<int64_t>(min(first_row + 8 * r + line, rows - 1)) * depth + 8 * chunk;
#pragma unroll
for (int c = 0; c < COLUMN_TILES; c++)
  column_at[c] = w + static_cast<int64_t>(min(first_column + 8 * c + line, columns - 1)) * depth + 8 * chunk;
const bool whole = ((reinterpret_cast<size_t>(x) | reinterpret_cast<size_t>(w)) & 15) == 0;

float sums[ROW_TILES][COLUMN_TILES][4] = {};
auto add = [&](const Eight (&numbers)[2 * ROW_TILES], const Eight (&weights)[COLUMN_TILES]) {
  #pragma unroll
  for (int s = 0; s < 8; s += 4) {
    uint32_t left[ROW_TILES][4], right[COLUMN_TILES][2];
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      #pragma unroll
      for (int r = 0; r < 2 * ROW_TILES; r++) memcpy(&left[r / 2][r % 2 + 2 * i], &numbers[r].at[s + 2 * i], 4);
      #pragma unroll
      for (int c = 0; c < COLUMN_TILES; c++) memcpy(&right[c][i], &weights[c].at[s + 2 * i], 4);
    }
    #pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      #pragma unroll
      for (int c = 0; c < COLUMN_TILES; c++) multiply_accumulate<BRAIN>(sums[r][c], left[r], right[c]);
    }
  }
};
auto write = [&](int row, int column, float sum) {
  if (row < rows && column < columns) product[static_cast<int64_t>(row) * columns + column] = static_cast<T>(sum);
};
// Of the sums of a tile a lane holds those of rows `line` and 8 more, and of columns 2 * chunk and the next one.
if constexpr (SPLIT) {
  constexpr int ITEMS = COLUMN_TILES + 2 * ROW_TILES, THREADS = 32 * PARTS;
  const int turns = (depth / 32 - warp + PARTS - 1) / PARTS;
  Eight* const mine = block_memory<Eight>() + threadIdx.x;
  auto slot = [&](int turn, int item) { return mine + (turn % STAGES * ITEMS + item) * THREADS; };
  auto add_parts = [&](auto fetch) {
    auto ask = [&](int turn) {
      if (turn < turns) {
        const int at = 32 * (warp + PARTS * turn);
        #pragma unroll
        for (int c = 0; c < COLUMN_TILES; c++) fetch(slot(turn, c), column_at[c] + at);
        #pragma unroll
        for (int r = 0; r < 2 * ROW_TILES; r++) fetch(slot(turn, COLUMN_TILES + r), row_at[r] + at);
      }
      copies_asked();
    };
    #pragma unroll
    for (int turn = 0; turn < STAGES - 1; turn++) ask(turn);
    #pragma unroll 2
    for (int turn = 0; turn < turns; turn++) {
      wait_for_copies<STAGES - 2>();
      ask(turn + STAGES - 1);
      Eight numbers[2 * ROW_TILES], weights[COLUMN_TILES];
      #pragma unroll
      for (int c = 0; c < COLUMN_TILES; c++) weights[c] = *slot(turn, c);
      #pragma unroll
      for (int r = 0; r < 2 * ROW_TILES; r++) numbers[r] = *slot(turn, COLUMN_TILES + r);
      add(numbers, weights);
    }
  };
  if (whole) {
    add_parts([](Eight* to, const T* from) { copy_async(to, from); });
  } else {
    add_parts([](Eight* to, const T* from) {
      #pragma unroll 1
      for (int j = 0; j < 8; j++) to->at[j] = from[j];
    });
  }
  // The same memory holds what the parts come to then.
  float* const partial = block_memory<float>();
  __syncthreads();
  #pragma unroll
  for (int r = 0; r < ROW_TILES; r++) {
    #pragma unroll
    for (int c = 0; c < COLUMN_TILES; c++) {
      #pragma unroll
      for (int i = 0; i < 4; i++)
        partial[(warp * ROWS + 16 * r + line + 8 * (i / 2)) * COLUMNS + 8 * c + 2 * chunk + i % 2] = sums[r][c][i];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * COLUMNS; i += THREADS) {
    float sum = 0;
    for (int part = 0; part < PARTS; part++) sum += partial[part * ROWS * COLUMNS + i];
    write(first_row + i / COLUMNS, first_column + i % COLUMNS, sum);
  }
} else {
  auto load = [&](const T* from) {
    if (whole) return *reinterpret_cast<const Eight*>(from);
    Eight eight;
    for (int j = 0; j < 8; j++) eight.at[j] = from[j];
    return eight;
  };
  float all[ROW_TILES][COLUMN_TILES][4] = {};
  for (int part = 0; part < PARTS; part++) {
    #pragma unroll 2
    for (int at = 32 * part; at < depth; at += 32 * PARTS) {
      Eight numbers[2 * ROW_TILES], weights[COLUMN_TILES];
      #pragma unroll
      for (int c = 0; c < COLUMN_TILES; c++) weights[c] = load(column_at[c] + at);
      #pragma unroll
      for (int r = 0; r < 2 * ROW_TILES; r++) numbers[r] = load(row_at[r] + at);
      add(numbers, weights);
    }
    #pragma unroll
    for (int i = 0; i < ROW_TILES * COLUMN_TILES * 4; i++) {
      float& sum = sums[i / 4 / COLUMN_TILES][i / 4 % COLUMN_TILES][i % 4];
      all[i / 4 / COLUMN_TILES][i / 4 % COLUMN_TILES][i % 4] += sum;
      sum = 0;
    }
  }
  #pragma unroll
  for (int r = 0; r < ROW_TILES; r++) {
    #pragma unroll
    for (int c = 0; c < COLUMN_TILES; c++) {
      for (int i = 0; i < 4; i++)
        write(first_row + 16 * r + line + 8 * (i / 2), first_column + 8 * c + 2 * chunk + i % 2, all[r][c][i]);
    }
  }
}
