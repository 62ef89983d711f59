#pragma once
// Text and JSONL files to token files, documents encoded on all threads, in memory that does not grow with
// the input.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/token_file.h"
#include "data/tokenizer.h"

namespace sluice {

struct TokenizeOptions {
  std::string output;             // prefix of the token files
  std::string validation_output;  // prefix for every validation_every-th document; empty: none is held out
  int64_t validation_every = 0;
  std::string format = "auto";  // by the file's name; text or jsonl
  std::string key = "text";     // JSONL: of the text
  int64_t max_document_mb = 0;  // of a document that is held in memory as a whole; 0: as the tokenizer needs
  bool skip_bad_documents = false;  // lines of JSONL that are no document are counted instead of refused
};

struct TokenizeProgress {
  int64_t documents = 0, tokens = 0;
  double megabytes = 0, seconds = 0;
  int64_t skipped = 0;             // bad lines of JSONL
  std::string first_problem = {};  // of the first of them: file, line and reason
};

/// A pair of token files (PREFIX.bin, PREFIX.idx) that was written, and what PREFIX.json says of it.
struct TokenizedFile {
  std::string prefix;
  TokenFileInfo info;
};

class TextTokenizer {
 public:
  /// tokenizer: outlives this. name: for PREFIX.json. progress: called after every part; may be empty.
  TextTokenizer(const TokenizeOptions& options, const Tokenizer& tokenizer, const std::string& name,
                std::function<void(const TokenizeProgress&)> progress = {});
  ~TextTokenizer();
  TextTokenizer(const TextTokenizer&) = delete;
  TextTokenizer& operator=(const TextTokenizer&) = delete;

  /// Reads a file, gzipped or not, or standard input ("-"). Error(data) names file and line.
  void read(const std::string& input);
  /// Writes the rest: nothing is at the prefixes before. Error(data) where no document was read, or none was
  /// left to be held out.
  std::vector<TokenizedFile> finish();
  TokenizeProgress progress() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sluice
