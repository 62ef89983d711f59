#pragma once
// Errors and texts that ranks exchange so that all of them reach the same outcome.
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace sluice {

/// Thrown by all ranks at the same point, so that they can still act together, for example save.
class SharedError : public Error {
 public:
  using Error::Error;
};

/// Collective. Returns root's text on every rank.
void broadcast_text(Communicator& ranks, std::string& text, int root);
/// Collective. Returns, on every rank, the problem of the lowest rank that has one, prefixed with "rank 3: "
/// if there are several ranks; empty if no rank has a problem.
std::string first_problem(Communicator& ranks, const std::string& mine);
/// Collective. Returns the host name of every rank.
std::vector<std::string> host_names(Communicator& ranks);

/// "0-3, 8": ranks in ascending order.
std::string rank_ranges(const std::vector<int>& ranks);
/// "ranks 0-3, 8 (hosts a, b)"; hosts: the host of every rank.
std::string rank_text(const std::vector<int>& ranks, const std::vector<std::string>& hosts);

}  // namespace sluice
