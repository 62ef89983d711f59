#pragma once
// Regular expressions of tokenizer files. They are written for Oniguruma (Ruby's syntax), which Hugging
// Face's `tokenizers` uses, and matched here by PCRE2; what the two understand differently is rewritten or
// refused.
#include <memory>
#include <string>
#include <string_view>

namespace sluice {

class Pattern {
 public:
  /// Memory of a search; one thread uses it at a time.
  class Memory {
   public:
    Memory();
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

   private:
    friend class Pattern;
    struct Parts;
    std::unique_ptr<Parts> parts_;
  };

  /// where: names file and key in errors. Error(data) with the place in the pattern where it is not valid, or
  /// uses what PCRE2 would understand in another way.
  Pattern(const std::string& regex, const std::string& where);
  Pattern(Pattern&&) noexcept;
  ~Pattern();

  /// The first match in valid UTF-8 that begins at `from` or behind it. Error(data) where the search takes
  /// more than its limit of steps.
  bool find(std::string_view text, size_t from, Memory& memory, size_t& begin, size_t& end) const;

 private:
  struct Code;
  std::string where_;
  std::unique_ptr<Code> code_;
};

/// The same expression for PCRE2. Error(data) as above.
std::string pcre_of_oniguruma(const std::string& regex, const std::string& where);

}  // namespace sluice
