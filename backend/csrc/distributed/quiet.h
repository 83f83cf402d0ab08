#pragma once

namespace tpu {

// From here on, nothing is seen of what gloo prints to standard output for each group of ranks that it connects:
// lines that begin with "[Gloo]". It has no setting for that.
void silence_gloo();

} // namespace tpu
