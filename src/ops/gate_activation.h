#pragma once
// The activations of gates, for both backends: scores and slopes from a logit z and s = sigmoid(z), which
// each backend computes its own way (Gated Attention, Qiu et al. 2025, table 4). In loops the activation is a
// constant, and the choice is made outside. Functions of the host as well: its compiler finds a case that is
// missing, nvcc's own does not.
#include <type_traits>

#include "core/kinds.h"

namespace sluice {

/// Calls f(std::integral_constant<GateActivation, activation>()).
template <class F>
void with_activation(GateActivation activation, F&& f) {
  using enum GateActivation;
  switch (activation) {
    case sigmoid:
      return f(std::integral_constant<GateActivation, sigmoid>());
    case silu:
      return f(std::integral_constant<GateActivation, silu>());
    case identity:
      return f(std::integral_constant<GateActivation, identity>());
    case ns_sigmoid:
      return f(std::integral_constant<GateActivation, ns_sigmoid>());
    case two_sigmoid:
      return f(std::integral_constant<GateActivation, two_sigmoid>());
  }
}

/// a(z)
template <class A>
constexpr A activate(GateActivation a, A z, A s) {
  switch (a) {
    case GateActivation::sigmoid:
      return s;
    case GateActivation::silu:
      return z * s;
    case GateActivation::identity:
      return z;
    case GateActivation::ns_sigmoid:
      return A(0.5) + A(0.5) * s;
    case GateActivation::two_sigmoid:
      return A(2) * s;
  }
  __builtin_unreachable();
}

/// a'(z)
template <class A>
constexpr A slope_of(GateActivation a, A z, A s) {
  switch (a) {
    case GateActivation::sigmoid:
      return s * (A(1) - s);
    case GateActivation::silu:
      return s * (A(1) + z * (A(1) - s));
    case GateActivation::identity:
      return A(1);
    case GateActivation::ns_sigmoid:
      return A(0.5) * s * (A(1) - s);
    case GateActivation::two_sigmoid:
      return A(2) * s * (A(1) - s);
  }
  __builtin_unreachable();
}

}  // namespace sluice
