#include "data/text_loss.h"

#include <spdlog/fmt/fmt.h>

namespace sluice {

void TextLoss::add(const TokenFileInfo& info) {
  if (info.token_bytes == 0 && info.lost_bytes == 0) return;  // not counted
  text_bytes += info.text_bytes;
  token_bytes += info.token_bytes;
  lost_bytes += info.lost_bytes;
}

double TextLoss::bytes_per_token_byte() const {
  return token_bytes > 0 && token_bytes != text_bytes
             ? static_cast<double>(text_bytes) / static_cast<double>(token_bytes)
             : 1.0;
}

double TextLoss::share() const {
  return lost_bytes > 0 ? static_cast<double>(lost_bytes) / static_cast<double>(text_bytes) : 0.0;
}

std::string TextLoss::describe(const char* before) const {
  if (lost_bytes == 0) return "";
  const double percent = 100 * share();
  return fmt::format("{}tokenizer drops {}% of the text's bytes", before,
                     percent < 0.1 ? fmt::format("{:.1g}", percent) : fmt::format("{:.1f}", percent));
}

TextLoss text_loss(const std::vector<std::string>& prefixes) {
  TextLoss loss;
  for (const std::string& prefix : prefixes)
    if (const auto info = read_token_file_info(prefix)) loss.add(*info);
  return loss;
}

}  // namespace sluice
