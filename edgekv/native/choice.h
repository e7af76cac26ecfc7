// Which of several kernels a processor runs.
#pragma once

#include <cstring>

namespace edgekv {

template <typename Make>
struct Choice {
  const char* name;
  bool (*runs)();
  Make make;  // the kernels, or null where they are not built
};

// The first that runs here, from the one named `limit` on (null: from the first on); null if there is none.
template <typename Make, size_t count, typename... Arguments>
auto first_choice(const Choice<Make> (&choices)[count], const char* limit, Arguments... arguments)
    -> decltype(choices[0].make(arguments...)) {
  bool allowed = limit == nullptr;
  for (const auto& choice : choices) {
    allowed = allowed || std::strcmp(limit, choice.name) == 0;
    if (!allowed || !choice.runs()) continue;
    if (const auto kernels = choice.make(arguments...)) return kernels;
  }
  return nullptr;
}

}  // namespace edgekv
