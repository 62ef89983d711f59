// The positions that tokens look up in the tables of cosines and sines. Include between isa_begin.h and
// isa_end.h.

namespace {

/// Error(data) "rope_forward: position 9 of token 3 is outside the table of 8 positions".
inline void check_positions(const char* op, const Tensor& positions, const Tensor& cos) {
  const int32_t* const position = positions.as<int32_t>();
  const int64_t table = cos.dim(0);
  for (int64_t t = 0; t < positions.dim(0); ++t)
    if (position[t] < 0 || position[t] >= table)
      fail(ExitCode::data, "{}: position {} of token {} is outside the table of {} positions", op,
           position[t], t, table);
}

}  // namespace
