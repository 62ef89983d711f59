// c tanh(x / c), written so that compilers vectorise it. Include between isa_begin.h and isa_end.h, after
// vector_math.h.

/// Given 1 / c and c. tanh(z) = 2 sigmoid(2 z) - 1; the error is about 2e-7 c in f32 for any x.
template <class A>
inline A soft_cap(A x, A c, A inverse) {
  return c * (A(2) * sigmoid(A(2) * inverse * x) - A(1));
}
