#pragma once
// What ranks tell each other in words: the same outcome on all.
#include <string>

#include "comm/communicator.h"

namespace sluice {

/// Thrown by all ranks at the same place, so that they can still do something together, such as saving.
class SharedError : public Error {
 public:
  using Error::Error;
};

/// Collective. The text of root, on every rank.
void broadcast_text(Communicator& ranks, std::string& text, int root);
/// Collective. Empty where no rank has a problem; else that of the lowest rank that has one, on every rank, behind "rank 3: "
/// where there are several ranks.
std::string first_problem(Communicator& ranks, const std::string& mine);

}  // namespace sluice
