#pragma once
// What ranks tell each other in words: the same outcome on all.
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace sluice {

/// Thrown by all ranks at the same place, so that they can still do something together, such as saving.
class SharedError : public Error {
 public:
  using Error::Error;
};

/// Collective. The text of root, on every rank.
void broadcast_text(Communicator& ranks, std::string& text, int root);
/// Collective. Empty where no rank has a problem; else that of the lowest rank that has one, on every rank,
/// behind "rank 3: " where there are several ranks.
std::string first_problem(Communicator& ranks, const std::string& mine);
/// Collective. The host of every rank.
std::vector<std::string> host_names(Communicator& ranks);

/// "0-3, 8": numbers of ranks, in order.
std::string rank_ranges(const std::vector<int>& ranks);
/// "ranks 0-3, 8 (hosts a, b)"; hosts: of every rank.
std::string rank_text(const std::vector<int>& ranks, const std::vector<std::string>& hosts);

}  // namespace sluice
