#include "data/token_check.h"

#include <spdlog/spdlog.h>

#include <filesystem>
#include <map>
#include <utility>

#include "config/fields.h"
#include "core/io.h"
#include "core/strict_json.h"

namespace sluice {
namespace {

struct NamedFile {
  std::string source;
  const TokenFile* file;
};

std::vector<NamedFile> files_of(const Blend& blend) {
  std::vector<NamedFile> files;
  const auto sources = blend.sources();
  for (size_t s = 0; s < sources.size(); ++s)
    for (const TokenFile& file : blend.files(s)) files.push_back({sources[s].name, &file});
  return files;
}

void check_tokenizer(const NamedFile& named, const TokenFileInfo& info, const Tokenizer& tokenizer) {
  if (info.tokenizer == tokenizer.fingerprint()) return;
  fail(ExitCode::data,
       "data source {}: {}.bin was made with another tokenizer.\n"
       "  the file's:  {}, vocabulary of {}, fingerprint {} (by {}.json)\n"
       "  this run's:  {}, vocabulary of {}, fingerprint {} (data.tokenizer)\n"
       "Tokenize the text again with this run's tokenizer (sluice tokenize TEXT -o {} --tokenizer {}), or "
       "set data.tokenizer to "
       "the one that the file was made with.",
       named.source, named.file->prefix(),
       info.tokenizer_name.empty() ? "unnamed" : printable(info.tokenizer_name), info.vocab_size,
       printable(info.tokenizer), named.file->prefix(), tokenizer.name(), tokenizer.vocab_size(),
       tokenizer.fingerprint(), named.file->prefix(), tokenizer.name());
}

/// Of a tokenizer that can end documents with one token or another: where it takes no such token for the end,
/// generation never ends.
void check_end(const NamedFile& named, const TokenFileInfo& info, const Tokenizer& tokenizer) {
  const int64_t ours = tokenizer.end_of_document();
  if (info.end_of_document == ours) return;
  const bool known = info.end_of_document >= 0 && info.end_of_document < tokenizer.vocab_size();
  const std::string own = printable(tokenizer.token_name(static_cast<int32_t>(ours)));
  const std::string theirs =
      known ? printable(tokenizer.token_name(static_cast<int32_t>(info.end_of_document))) : "no token of it";
  fail(ExitCode::data,
       "data source {}: the documents of {}.bin end with token {} ({}, by {}.json), but those of this run "
       "with {} ({}). Set data.tokenizer.end_of_document to {}, or tokenize the text again: "
       "sluice tokenize TEXT -o {} --tokenizer {} --end-of-document '{}'",
       named.source, named.file->prefix(), info.end_of_document, theirs, named.file->prefix(), ours, own,
       theirs, named.file->prefix(), tokenizer.name(), own);
}

[[noreturn]] void fail_info(const NamedFile& named, const std::string& what) {
  const std::string& prefix = named.file->prefix();
  fail(ExitCode::data,
       "data source {}: {}.json does not belong to {}.bin and {}.idx: {}. Tokenize the text again, or remove "
       "{}.json if another program wrote the tokens.",
       named.source, prefix, prefix, prefix, what, prefix);
}

void check_counts(const NamedFile& named, const TokenFileInfo& info) {
  const TokenFile& file = *named.file;
  if (info.tokens != file.num_tokens() || info.documents != file.num_documents())
    fail_info(named, fmt::format("it says {} tokens in {} documents, the files hold {} in {}", info.tokens,
                                 info.documents, file.num_tokens(), file.num_documents()));
}

void check_vocabulary(const NamedFile& named, int64_t largest, int64_t vocab_size) {
  if (largest >= 0 && largest < vocab_size) return;
  const int64_t at = named.file->find_outside(vocab_size);
  if (at < 0)
    fail_info(named, fmt::format("it says the largest token is {}, but none is outside the vocabulary of {}",
                                 largest, vocab_size));
  fail(ExitCode::data,
       "data source {}: {}.bin: token {} is {}, outside the vocabulary of {} (model.vocab_size; the largest "
       "token of the file is {}). "
       "It was made with another tokenizer, or is damaged. If the model is right, tokenize the text again "
       "with the model's tokenizer.",
       named.source, named.file->prefix(), at, named.file->token(at), vocab_size, largest);
}

/// Throws Error(data) if a validation set shares a file with the training data or has a file with the same
/// contents.
void check_held_out(const Blend& training, const std::vector<std::unique_ptr<Blend>>& validation) {
  std::map<std::pair<uint64_t, uint64_t>, NamedFile> by_identity;
  std::multimap<int64_t, NamedFile> by_size;  // files of the same contents are of the same size
  for (const NamedFile& named : files_of(training)) {
    by_identity.emplace(std::pair(named.file->identity().device, named.file->identity().inode), named);
    by_size.emplace(named.file->bytes(), named);
  }
  const auto overlap = [](const NamedFile& trained, const NamedFile& held, const char* what) {
    fail(ExitCode::data,
         "validation set {} is part of the training data: {}.bin {} {}.bin of the training source {}. Its "
         "loss would not measure generalisation: name another set in data.validation, or set "
         "data.allow_overlap=true to measure it all "
         "the same.",
         held.source, held.file->prefix(), what, trained.file->prefix(), trained.source);
  };
  for (const auto& set : validation)
    for (const NamedFile& held : files_of(*set)) {
      const auto& identity = held.file->identity();
      if (const auto same = by_identity.find({identity.device, identity.inode}); same != by_identity.end())
        overlap(same->second, held, "is the same file as");
      const auto [begin, end] = by_size.equal_range(held.file->bytes());
      for (auto candidate = begin; candidate != end; ++candidate)
        if (candidate->second.file->sampled_fingerprint() == held.file->sampled_fingerprint())
          overlap(candidate->second, held, "holds the same tokens as");
    }
}

}  // namespace

std::string tokenizer_name(const TokenizerConfig& config) {
  std::string name(enum_name(config.type));
  if (!config.path.empty()) name += " " + std::filesystem::path(config.path).filename().string();
  return name;
}

void check_tokens(const Blend& blend, const Tokenizer& tokenizer, const Config& config) {
  for (const NamedFile& named : files_of(blend)) {
    const TokenFile& file = *named.file;
    const std::optional<TokenFileInfo> info = read_token_file_info(file.prefix());
    if (info) {
      check_tokenizer(named, *info, tokenizer);
      check_end(named, *info, tokenizer);
      check_counts(named, *info);
    }
    const bool scanned = !info || file.bytes() <= kScannedBytes;
    if (!info && file.bytes() > kScannedBytes)
      spdlog::warn("{}.bin has no PREFIX.json with its largest token; all {:.1f} GB are read to find it",
                   file.prefix(), static_cast<double>(file.bytes()) / 1e9);
    const int64_t largest = scanned ? file.max_token() : info->largest_token;
    check_vocabulary(named, largest, config.model.vocab_size);
    if (info && largest != info->largest_token)
      fail_info(named, fmt::format("it says the largest token is {}, the files hold {}", info->largest_token,
                                   largest));
  }
}

bool tokenizer_known(const Blend& blend, size_t source) {
  for (const TokenFile& file : blend.files(source))
    if (!io::exists(file.prefix() + ".json")) return false;
  return true;
}

void check_data(const Blend& training, const std::vector<std::unique_ptr<Blend>>& validation,
                const Tokenizer& tokenizer, const Config& config) {
  check_tokens(training, tokenizer, config);
  for (const auto& set : validation) check_tokens(*set, tokenizer, config);
  if (!config.data.allow_overlap) check_held_out(training, validation);
}

}  // namespace sluice
