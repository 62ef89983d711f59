#include "command.h"

#include <spdlog/fmt/fmt.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <limits>
#include <type_traits>

#include "config/scalars.h"
#include "config/yaml.h"

namespace sluice {

namespace {

/// The type of the whole numbers that an option takes, one or several; void for other options.
template <class T>
struct WholeNumber {
  using type = std::conditional_t<std::is_integral_v<T> && !std::is_same_v<T, bool>, T, void>;
};
template <class T>
struct WholeNumber<std::vector<T>> : WholeNumber<T> {};

/// CLI11 takes -1 for the largest unsigned number, 010 for 8 and a number that is too large for the largest
/// one. Here whole numbers are those of a configuration: 4096, 1k, 1e9. Writes the number out for CLI11.
template <class T>
std::string read_whole(std::string& text) {
  std::conditional_t<std::is_unsigned_v<T>, uint64_t, int64_t> value = 0;
  if (std::string problem = parse_integer(text, value); !problem.empty()) return problem;
  if (value > std::numeric_limits<T>::max()) return "is too large: " + text;
  if (value < std::numeric_limits<T>::min()) return "is too small: " + text;
  text = std::to_string(value);
  return "";
}

/// Help of a command that needs one of its subcommands, which CLI11 does not know: see require_subcommand.
class RequiredSubcommand : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App* app, std::string name) const override {
    std::string usage = CLI::Formatter::make_usage(app, name);
    const std::string optional = "[SUBCOMMAND]";
    if (const size_t at = usage.find(optional); at != std::string::npos)
      usage.replace(at, optional.size(), "SUBCOMMAND");
    return usage;
  }
};

/// Numbers are those of a configuration: no nan, inf or 0x10, which CLI11 takes.
std::string read_finite(const std::string& text) {
  double value = 0;
  return parse_number(text, value);
}

}  // namespace

Option* Option::required() { return option_->required(), this; }
Option* Option::type_name(const std::string& name) { return option_->type_name(name), this; }
Option* Option::group(const std::string& title) { return option_->group(title), this; }
Option* Option::delimiter(char between) { return option_->delimiter(between), this; }
Option* Option::allow_extra_args(bool allowed) { return option_->allow_extra_args(allowed), this; }
/// CLI11's own checks print the largest double in full. What they are given is a number already.
Option* Option::not_negative() {
  const auto check = [](const std::string& text) {
    return std::strtod(text.c_str(), nullptr) < 0 ? "must not be negative, got " + text : std::string();
  };
  return option_->check(check), this;
}

Option* Option::between(double low, double high) {
  const auto check = [low, high](const std::string& text) {
    const double value = std::strtod(text.c_str(), nullptr);
    return value < low || value > high ? fmt::format("must be from {} to {}, got {}", low, high, text)
                                       : std::string();
  };
  return option_->check(check), this;
}

Option* Option::one_of(const std::vector<std::string>& words) {
  return option_->check(CLI::IsMember(words)), this;
}

bool Option::given() const { return option_->count() > 0; }

Command::Command(CLI::App& app) : app_(app) {}
Command::~Command() = default;

Command* Command::add_subcommand(const std::string& name, const std::string& help) {
  commands_.push_back(std::make_unique<Command>(*app_.add_subcommand(name, help)));
  return commands_.back().get();
}

template <class T>
Option* Command::add_option(const std::string& names, T& target, const std::string& help) {
  CLI::Option* option = app_.add_option(names, target, help);
  using Whole = typename WholeNumber<T>::type;
  if constexpr (!std::is_void_v<Whole>) option->transform(CLI::Validator(read_whole<Whole>, ""));
  if constexpr (std::is_same_v<T, double>) option->check(read_finite);
  options_.push_back(std::make_unique<Option>(option));
  return options_.back().get();
}
template Option* Command::add_option(const std::string&, std::string&, const std::string&);
template Option* Command::add_option(const std::string&, int&, const std::string&);
template Option* Command::add_option(const std::string&, int64_t&, const std::string&);
template Option* Command::add_option(const std::string&, uint64_t&, const std::string&);
template Option* Command::add_option(const std::string&, double&, const std::string&);
template Option* Command::add_option(const std::string&, std::vector<std::string>&, const std::string&);
template Option* Command::add_option(const std::string&, std::vector<int64_t>&, const std::string&);
template Option* Command::add_option(const std::string&, std::vector<int>&, const std::string&);

Option* Command::add_flag(const std::string& names, bool& target, const std::string& help) {
  options_.push_back(std::make_unique<Option>(app_.add_flag(names, target, help)));
  return options_.back().get();
}

Command* Command::footer(const std::string& text) { return app_.footer(text), this; }
Command* Command::callback(std::function<void()> work) { return app_.callback(std::move(work)), this; }
/// CLI11's own check says that a subcommand is missing, also where one was given that it does not know.
Command* Command::require_subcommand(int count) {
  app_.require_subcommand(0, count);
  app_.formatter(std::make_shared<RequiredSubcommand>());
  app_.parse_complete_callback([this] {
    if (!app_.get_subcommands().empty()) return;
    const std::vector<std::string> words = app_.remaining();
    if (words.empty()) throw CLI::RequiredError("A subcommand");
    std::vector<std::string> names;
    for (const CLI::App* known : app_.get_subcommands({})) names.push_back(known->get_name());
    const std::string near = yaml::nearest(words[0], names);
    throw CLI::ParseError(
        fmt::format("unknown {} {}; {}", words[0].starts_with("-") ? "option" : "command", words[0],
                    near.empty() ? fmt::format("commands: {}", fmt::join(names, ", "))
                                 : fmt::format("did you mean {}?", near)),
        CLI::ExitCodes::ExtrasError);
  });
  return this;
}

std::string Command::program() const {
  const CLI::App* top = &app_;
  while (top->get_parent()) top = top->get_parent();
  return top->get_name();
}

std::vector<CommandWords> Command::words() const {
  std::vector<CommandWords> all;
  const std::function<void(const CLI::App&, const std::string&)> visit = [&](const CLI::App& app,
                                                                             const std::string& path) {
    CommandWords words{path, {}, {}};
    for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
      words.commands.push_back(command->get_name());
    for (const CLI::Option* option : app.get_options()) {
      for (const std::string& name : option->get_lnames()) words.options.push_back("--" + name);
      for (const std::string& name : option->get_snames()) words.options.push_back("-" + name);
    }
    all.push_back(words);
    for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
      visit(*command, path + " " + command->get_name());
  };
  visit(app_, app_.get_name());
  return all;
}

std::string cli11_version() { return CLI11_VERSION; }

}  // namespace sluice
