/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/metrics.h"

const struct metric_row metric_rows[METRIC_END] = {
#define METRIC_ROW(id, kind, text, words) \
	[METRIC_##id] = {.name = (text), .help = (words), .type = METRIC_##kind},
	METRICS(METRIC_ROW)
#undef METRIC_ROW
};
