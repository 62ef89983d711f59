#pragma once
// Runs seen from outside, by the files that they write: `sluice watch`.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "run/console.h"

namespace sluice {

/// Follows a run folder. What cannot be read yet is simply missing: a run may be starting, or be moved.
class RunFollower {
 public:
  explicit RunFollower(std::string folder);

  /// Reads what is new: whole lines of metrics.jsonl and eval.jsonl, and status.json.
  void update();

  struct Facts {
    std::string name, state;  // of status.json: running, done, preempted, failed; empty: unknown
    int64_t step = -1, max_steps = 0, skipped = 0;
    double loss = 0, grad_norm = 0, tokens_per_second = 0, seconds_left = -1;
    std::string validation;  // "kjv 1.234", of the last evaluation's first set
  };
  const Facts& facts() const { return facts_; }
  /// Step and loss of each logged step.
  const std::vector<std::pair<int64_t, double>>& losses() const { return losses_; }
  bool ended() const {
    return facts_.state == "done" || facts_.state == "failed" || facts_.state == "preempted";
  }

 private:
  /// Of a file that grows by whole lines, and may be rewritten shorter where a run resumes.
  struct Tail {
    std::string path;
    int64_t offset = 0;
    uint64_t file = 0;  // inode
  };
  /// The new whole lines; begins anew, and sets `restarted`, where the file was replaced or cut.
  static std::vector<std::string> new_lines(Tail& tail, bool& restarted);
  void read_status();

  std::string folder_;
  Tail metrics_, evals_;
  Facts facts_;
  std::vector<std::pair<int64_t, double>> losses_;
};

/// The course of values in `width` characters: means of equal shares of the steps, from the lowest to the
/// highest value. Steps without a value are blank, values that are not finite "!".
std::string sparkline(const std::vector<std::pair<int64_t, double>>& values, int width, bool unicode);

/// One line per run under a heading, each at most terminal.width columns wide.
std::vector<std::string> watch_table(const std::vector<RunFollower>& runs, const Terminal& terminal);

}  // namespace sluice
