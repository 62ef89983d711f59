#include "run/trace.h"

#include <nlohmann/json.hpp>

namespace sluice {

std::string chrome_trace(const Profile& profile, const std::string& device) {
  nlohmann::ordered_json events = nlohmann::ordered_json::array();
  events.push_back({{"name", "process_name"}, {"ph", "M"}, {"pid", 0}, {"args", {{"name", "sluice"}}}});
  events.push_back(
      {{"name", "thread_name"}, {"ph", "M"}, {"pid", 0}, {"tid", 0}, {"args", {{"name", device}}}});
  for (const Profile::Slice& slice : profile.timeline())
    events.push_back({{"name", slice.op},
                      {"cat", "op"},
                      {"ph", "X"},
                      {"ts", 1e6 * slice.start},
                      {"dur", 1e6 * slice.seconds},
                      {"pid", 0},
                      {"tid", 0}});
  return nlohmann::ordered_json{{"displayTimeUnit", "ms"}, {"traceEvents", events}}.dump() + "\n";
}

}  // namespace sluice
