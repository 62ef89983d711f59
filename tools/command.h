#pragma once
// What a sub-command says of itself and its options. CLI11 is behind it, in one file: it takes longer to
// compile than all of the commands together.
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace sluice {

class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}
  Option* required();
  Option* type_name(const std::string& name);  // what help shows in the value's place
  Option* group(const std::string& title);     // under which help lists it
  Option* delimiter(char between);             // several values in one word
  Option* allow_extra_args(bool allowed);      // several words behind one name
  Option* not_negative();
  Option* between(double low, double high);
  Option* one_of(const std::vector<std::string>& words);

 private:
  CLI::Option* option_;
};

class Command {
 public:
  explicit Command(CLI::App& app);
  ~Command();
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  Command* add_subcommand(const std::string& name, const std::string& help);
  /// The target outlives parsing. Names as CLI11 has them: "path" (by its place), "--set", "-o,--output". T:
  /// std::string, bool, int, int64_t, uint64_t, double, or a std::vector of strings, int64_t or int.
  template <class T>
  Option* add_option(const std::string& names, T& target, const std::string& help);
  Option* add_flag(const std::string& names, bool& target, const std::string& help);
  Command* footer(const std::string& text);       // behind the help: examples
  Command* callback(std::function<void()> work);  // when the command was chosen
  Command* require_subcommand(int count);
  /// Name of the program, as it was called.
  std::string program() const;

 private:
  CLI::App& app_;
  std::vector<std::unique_ptr<Command>> commands_;
  std::vector<std::unique_ptr<Option>> options_;
};

/// Version of CLI11.
std::string cli11_version();

}  // namespace sluice
