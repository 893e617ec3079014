/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lines are for stderr, which the journal reads: which then handles them. Only a line
 * that has fields is sent to journald's own socket, in its native protocol, which is
 * NAME=value lines in a datagram: no library is worth that. Nothing waits for journald; a
 * line that it does not take at once is one of stderr.
 */
#include "daemon/base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/sanitize.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define LINE_MAX_BYTES 1024

int log_threshold = LOG_LEVEL_INFO;
static int format = LOG_FORMAT_JOURNAL;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int journal = -1; /* to journald, for lines with fields */
static struct sockaddr_un journal_at;

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
	return err_raise(ERR_INVAL,
			 "level '%.32s': must be error, warn, info, debug or trace", s);
}

const char *log_level_name(enum log_level level)
{
	return levels[level].name;
}

/* False when the site has used up this second; *dropped_p = lines dropped before. */
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

/* The prefix of the text. */
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

/* journald's native protocol: NAME=value lines. False: it did not take it. */
static bool log_send(enum log_level level, const struct log_field *fields,
		     const char *message)
{
	char datagram[4 * LINE_MAX_BYTES];
	size_t n = log_clamp(snprintf(datagram, sizeof(datagram),
				      "MESSAGE=%s\nPRIORITY=%d\nSYSLOG_IDENTIFIER=kvd\n",
				      message, levels[level].priority));

	for (; fields->name && n < sizeof(datagram); fields++) {
		size_t at;

		n += log_clamp(snprintf(datagram + n, sizeof(datagram) - n,
					"%s=", fields->name));
		at = n;
		if (n < sizeof(datagram))
			n += log_clamp(snprintf(datagram + n, sizeof(datagram) - n, "%s",
						fields->value));
		if (n >= sizeof(datagram) - 1)
			return false;
		n = at + sanitize_text(datagram + at, n - at);
		datagram[n++] = '\n';
	}
	return n < sizeof(datagram) &&
	       sendto(journal, datagram, n, MSG_DONTWAIT | MSG_NOSIGNAL,
		      (const struct sockaddr *)&journal_at, sizeof(journal_at)) >= 0;
}

void log_journal_open(const char *path)
{
	if (journal >= 0)
		close(journal);
	journal_at = (struct sockaddr_un){.sun_family = AF_UNIX};
	snprintf(journal_at.sun_path, sizeof(journal_at.sun_path), "%s",
		 path ? path : "/run/systemd/journal/socket");
	journal = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
}

__attribute__((format(printf, 7, 0))) static void log_vwrite(
	struct log_site *site, enum log_level level, const struct log_field *fields,
	const char *subsystem, const char *object, const char *text, const char *fmt,
	va_list ap)
{
	char line[LINE_MAX_BYTES];
	size_t n, prefix, cap = sizeof(line) - 40; /* the dropped= tail and '\n' */
	uint32_t dropped;

	if (!log_admit(site, &dropped))
		return;
	n = prefix = put_prefix(line, cap, level);
	n += log_clamp(snprintf(line + n, cap - n, "%s%s%s: %s%s", subsystem,
				object ? " " : "", object ? object : "", text,
				fmt[0] ? " " : ""));
	if (n < cap)
		n += log_clamp(vsnprintf(line + n, cap - n, fmt, ap));
	if (n >= cap)
		n = cap - 1;
	n = sanitize_text(line, n); /* one event, one line: no forged ones */
	if (dropped)
		n += log_clamp(
			snprintf(line + n, sizeof(line) - n - 1, " dropped=%u", dropped));
	line[n] = '\0';
	if (fields && journal >= 0 &&
	    __atomic_load_n(&format, __ATOMIC_RELAXED) == LOG_FORMAT_JOURNAL &&
	    log_send(level, fields, line + prefix))
		return;
	line[n++] = '\n';
	/* a full or closed stderr must not hurt the daemon */
	(void)!write(STDERR_FILENO, line, n);
}

void log_write(struct log_site *site, enum log_level level,
	       const struct log_field *fields, const char *subsystem, const char *object,
	       const char *text, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	pthread_mutex_lock(&lock);
	log_vwrite(site, level, fields, subsystem, object, text, fmt, ap);
	pthread_mutex_unlock(&lock);
	va_end(ap);
}
