// c tanh(x / c), written so that compilers vectorise it. Include between isa_begin.h and isa_end.h, after
// vector_math.h.

/// For one over c and c. tanh(z) = 2 sigmoid(2 z) - 1: off by some 2e-7 c in f32, whatever x is.
template <class A>
inline A soft_cap(A x, A c, A inverse) {
  return c * (A(2) * sigmoid(A(2) * inverse * x) - A(1));
}
