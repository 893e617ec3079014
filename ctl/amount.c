/* SPDX-License-Identifier: Apache-2.0 */
/* Amounts in readable units. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/ctl.h"
#include "daemon/base/mem.h"

static char *text_ring(void)
{
	static char texts[8][32];
	static unsigned int at;

	return texts[at++ % ARRAY_LEN(texts)];
}

const char *ctl_bytes(double bytes)
{
	static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
	char *text = text_ring();
	unsigned int u = 0;

	for (; bytes >= 10240 && u + 1 < ARRAY_LEN(units); u++)
		bytes /= 1024;
	snprintf(text, 32, u ? "%.1f %s" : "%.0f %s", bytes, units[u]);
	return text;
}

const char *ctl_ms(double ms)
{
	char *text = text_ring();
	unsigned long s = (unsigned long)(ms / 1000);

	if (ms < 10)
		snprintf(text, 32, "%.2f ms", ms);
	else if (ms < 10000)
		snprintf(text, 32, "%.0f ms", ms);
	else if (s < 60)
		snprintf(text, 32, "%lu s", s);
	else if (s < 3600)
		snprintf(text, 32, "%lu:%02lu min", s / 60, s % 60);
	else if (s < 86400)
		snprintf(text, 32, "%lu:%02lu h", s / 3600, s / 60 % 60);
	else
		snprintf(text, 32, "%lud %02lu:%02lu", s / 86400, s / 3600 % 24,
			 s / 60 % 60);
	return text;
}

bool ctl_size(const char *text, uint64_t *size_p, const char **end_p)
{
	static const char units[] = "KMGkmg";
	const char *unit;
	char *end;

	errno = 0;
	*size_p = strtoull(text, &end, 10);
	if (*text < '0' || *text > '9' || errno)
		return false;
	unit = *end ? strchr(units, *end) : NULL;
	if (unit) {
		unsigned int shift = 10 * ((unsigned int)(unit - units) % 3 + 1);

		if (*size_p > UINT64_MAX >> shift)
			return false;
		*size_p <<= shift;
		end++;
	}
	*end_p = end;
	return true;
}

bool ctl_sizes(const char *text, uint64_t most, uint64_t sizes[CTL_SIZES_MAX],
	       unsigned int *count_p)
{
	*count_p = 0;
	for (const char *end;; text = end + 1) {
		uint64_t size;

		if (*count_p == CTL_SIZES_MAX || !ctl_size(text, &size, &end) || !size ||
		    size > most || (*end && *end != ','))
			return false;
		sizes[(*count_p)++] = size;
		if (!*end)
			return true;
	}
}

const char *ctl_count(double count, const char *noun)
{
	char *text = text_ring();

	snprintf(text, 32, "%.0f %.20s%s", count, noun, count == 1 ? "" : "s");
	return text;
}
