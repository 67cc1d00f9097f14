// A tree of the first paths: the body of a CUDA kernel (launches.py). One block of threads, of which each fills rows.

const int rows = static_cast<int>(settings[0]) + 1;

for (int row = threadIdx.x; row < rows; row += THREADS) {
  for (int other = 0; other < rows; other++) visible[row * rows + other] = false;
  int depth = 0;
  for (int at = row; at > 0; at = parents[at - 1]) {
    visible[row * rows + at] = true;
    depth++;
  }
  visible[row * rows] = true;
  depths[row] = depth;
  if (row > 0) {
    tokens[row - 1] = token_ids[candidates[row - 1]];
    probabilities[row - 1] = expf(log_probs[candidates[row - 1]]);
  }
}
