#pragma once
// What the fuzz programs share: a folder for their files, and what counts as a finding.
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace sluice::fuzz {

/// Prints the finding and aborts, so that libFuzzer keeps the input.
[[noreturn]] void finding(const std::string& what);
inline void expect(bool holds, const std::string& what) {
  if (!holds) finding(what);
}

/// Runs `body` and returns whether it returned. An input may be refused by an Error; a finding is an Error
/// that says that a contract was violated (ExitCode::internal), a message that a terminal cannot show (a
/// control character, invalid UTF-8, more than a megabyte), and any other exception.
bool attempt(const std::function<void()>& body);
/// Runs what no input may make fail, like reading what the program has just written; an Error is a finding,
/// too, which begins with `what`.
void must(const std::string& what, const std::function<void()>& body);

/// The working folder of the process, which is made on the first call and removed at exit.
const std::string& folder();
/// Writes a file below folder(); its folders are created.
void write(const std::string& name, std::string_view content);
/// The content of a file below folder().
std::string read(const std::string& name);
/// Removes everything below folder().
void clear();

/// Several files as one text: what follows a line "=== NAME" is the content of NAME, without the last line
/// end. What comes before the first such line is the content of "". Names that could lead out of a folder are
/// passed over.
using Files = std::vector<std::pair<std::string, std::string>>;
Files split(std::string_view archive);
std::string join(const Files& files);

/// A source of choices in a mutator.
class Random {
 public:
  explicit Random(unsigned seed) : state_(seed * 2654435761u + 1) {}
  /// In [0, n).
  uint32_t below(uint32_t n);
  bool one_in(uint32_t n) { return below(n) == 0; }
  template <class List>
  auto& of(List& list) {
    return list[below(static_cast<uint32_t>(std::size(list)))];
  }

 private:
  uint64_t state_;
};

/// libFuzzer's own mutation of `text`, of at most `most` bytes afterwards.
std::string mutated(const std::string& text, size_t most);
/// A change of a JSON text that keeps it JSON: a value replaced by a critical one, removed, copied, or moved.
/// A text that is not JSON is mutated as bytes.
std::string mutated_json(const std::string& text, size_t most, Random& random);
/// A change of one of the files of an archive, of JSON as JSON; or of their names and number.
std::string mutated_archive(const std::string& archive, size_t most, Random& random);
/// The same, mostly of one line of a file of JSON lines: changed as JSON, copied, or cut.
std::string mutated_lines(const std::string& archive, size_t most, Random& random);

/// Writes a mutation back to where libFuzzer wants it.
size_t put(const std::string& text, uint8_t* data, size_t most);
inline std::string text_of(const uint8_t* data, size_t size) {
  return std::string(reinterpret_cast<const char*>(data), size);
}

}  // namespace sluice::fuzz

/// What each program defines beside LLVMFuzzerTestOneInput where it has a mutation of its own.
#define SLUICE_FUZZ_MUTATOR(call)                                                                     \
  extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned seed) { \
    ::sluice::fuzz::Random random(seed);                                                              \
    const std::string text = ::sluice::fuzz::text_of(data, size);                                     \
    return ::sluice::fuzz::put(call, data, most);                                                     \
  }
