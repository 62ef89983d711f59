#include "run/evaluation.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <vector>

#include "comm/collective_errors.h"
#include "comm/reduce.h"
#include "core/caught.h"

namespace sluice {

bool evaluate_between_steps(const Evaluator& evaluator, Trainer& trainer, const StopSignals& signals,
                            const std::function<void()>& computes,
                            const std::function<void(const EvalResult&)>& report) {
  Communicator& ranks = trainer.ranks();
  const bool leads = ranks.rank() == 0;
  const bool together = trainer.plan().forward_needs_all_ranks() && ranks.size() > 1;
  trainer.wait_for_weights();
  std::string problem;
  struct Outcome {
    int64_t interrupted, code;
  } mine{0, 0};
  if (leads || together) {
    computes();
    const auto stop = [&] { return together ? any_rank(ranks, signals.requested()) : signals.requested(); };
    try {
      const std::optional<EvalResult> result =
          evaluator.run(trainer.context(), trainer.model(), trainer.store(), trainer.micro_batch(),
                        trainer.analysed(), stop, nullptr, !together);
      mine.interrupted = !result;
      if (leads && result) report(*result);
    } catch (const std::exception&) {
      const Error error = caught_error();
      // Where all compute it together, bad data is found by all; anything else leaves the others in the
      // middle of it.
      if (together && error.code() != ExitCode::data) throw;
      mine.code = static_cast<int64_t>(error.code());
      problem = error.what();
    }
  }
  std::vector<Outcome> all(static_cast<size_t>(ranks.size()));
  ranks.all_gather(all.data(), &mine, sizeof mine);
  for (const Outcome& outcome : all)
    if (outcome.code != 0)
      throw SharedError(
          static_cast<ExitCode>(outcome.code),
          fmt::format("evaluation at step {}: {}", trainer.next_step(), first_problem(ranks, problem)));
  return std::none_of(all.begin(), all.end(), [](const Outcome& outcome) { return outcome.interrupted; });
}

}  // namespace sluice
