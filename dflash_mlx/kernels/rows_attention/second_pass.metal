// The second pass: a thread puts the parts of one number of a row together, in the order of the positions. A part of
// which the row saw nothing changes nothing. marks (B, L, heads, splits, 2), sums (B, L, heads, splits, D), out (B, L,
// heads, D).

constexpr float NEVER = -3e38f;
const int splits = marks_shape[3];
const ulong i = thread_position_in_grid.x, row = i / D;

float highest = NEVER, total = 0, sum = 0;
for (int split = 0; split < splits; split++) {
  const ulong at = row * splits + split;
  const float top = max(highest, marks[2 * at]), before = exp2(highest - top), now = exp2(marks[2 * at] - top);
  total = total * before + marks[2 * at + 1] * now;
  sum = sum * before + sums[at * D + i % D] * now;
  highest = top;
}
out[i] = static_cast<T>(total > 0 ? sum / total : 0.0f);
