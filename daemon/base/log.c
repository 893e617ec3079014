/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define LINE_MAX_BYTES 1024

int log_threshold = LOG_LEVEL_INFO;
static int format = LOG_FORMAT_JOURNAL;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static const struct {
	const char *name;
	int priority; /* syslog(3) severity */
} levels[] = {
	[LOG_LEVEL_ERROR] = {"error", 3}, [LOG_LEVEL_WARN] = {"warn", 4},
	[LOG_LEVEL_INFO] = {"info", 6},	  [LOG_LEVEL_DEBUG] = {"debug", 7},
	[LOG_LEVEL_TRACE] = {"trace", 7},
};

void log_set_level(enum log_level level)
{
	__atomic_store_n(&log_threshold, (int)level, __ATOMIC_RELAXED);
}

void log_set_format(enum log_format f)
{
	__atomic_store_n(&format, (int)f, __ATOMIC_RELAXED);
}

enum log_format log_format_of_stderr(void)
{
	const char *stream = getenv("JOURNAL_STREAM");
	unsigned long long dev, ino;
	struct stat st;

	if (stream && sscanf(stream, "%llu:%llu", &dev, &ino) == 2 &&
	    fstat(STDERR_FILENO, &st) == 0 && st.st_dev == dev && st.st_ino == ino)
		return LOG_FORMAT_JOURNAL;
	return LOG_FORMAT_PLAIN;
}

int log_level_parse(const char *s, enum log_level *level_p)
{
	for (size_t i = 0; i < ARRAY_LEN(levels); i++) {
		if (strcmp(s, levels[i].name) == 0) {
			*level_p = (enum log_level)i;
			return 0;
		}
	}
	return err_raise(ERR_INVAL, "level '%.32s': one of error warn info debug trace",
			 s);
}

const char *log_level_name(enum log_level level)
{
	return levels[level].name;
}

/* False when the site has used up this second; *dropped_p = what it left out. */
static bool log_admit(struct log_site *site, uint32_t *dropped_p)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	*dropped_p = 0;
	if (site->second != (uint64_t)now.tv_sec) {
		*dropped_p = site->dropped;
		*site = (struct log_site){.second = (uint64_t)now.tv_sec};
	}
	if (site->lines >= LOG_BURST) {
		site->dropped++;
		return false;
	}
	site->lines++;
	return true;
}

static size_t log_clamp(int n)
{
	return n < 0 ? 0 : (size_t)n;
}

/* What stands in front of the text. */
static size_t put_prefix(char *line, size_t cap, enum log_level level)
{
	struct timespec now;
	struct tm tm;
	size_t n;

	if (__atomic_load_n(&format, __ATOMIC_RELAXED) == LOG_FORMAT_JOURNAL)
		return log_clamp(snprintf(line, cap, "<%d>", levels[level].priority));
	clock_gettime(CLOCK_REALTIME, &now);
	localtime_r(&now.tv_sec, &tm);
	n = strftime(line, cap, "%F %T", &tm);
	return n + log_clamp(snprintf(line + n, cap - n, ".%03ld %-5s ",
				      now.tv_nsec / 1000000, levels[level].name));
}

void log_write(struct log_site *site, enum log_level level, const char *subsystem,
	       const char *object, const char *text, const char *fmt, ...)
{
	char line[LINE_MAX_BYTES];
	size_t n, cap = sizeof(line) - 40; /* room for the dropped= tail and '\n' */
	uint32_t dropped;
	va_list ap;

	pthread_mutex_lock(&lock);
	if (!log_admit(site, &dropped)) {
		pthread_mutex_unlock(&lock);
		return;
	}
	n = put_prefix(line, cap, level);
	n += log_clamp(snprintf(line + n, cap - n, "%s%s%s: %s%s", subsystem,
				object ? " " : "", object ? object : "", text,
				fmt[0] ? " " : ""));
	if (n < cap) {
		va_start(ap, fmt);
		n += log_clamp(vsnprintf(line + n, cap - n, fmt, ap));
		va_end(ap);
	}
	if (n >= cap)
		n = cap - 1;
	for (size_t i = 0; i < n; i++) { /* one event, one line: no forged lines */
		if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f)
			line[i] = '?';
	}
	if (dropped)
		n += log_clamp(
			snprintf(line + n, sizeof(line) - n - 1, " dropped=%u", dropped));
	line[n++] = '\n';
	/* a full or closed stderr must not hurt the daemon */
	(void)!write(STDERR_FILENO, line, n);
	pthread_mutex_unlock(&lock);
}
