/* SPDX-License-Identifier: Apache-2.0 */
/*
 * log: one line an event, on stderr, with the journal's "<N>" priority prefix.
 *
 *   log_warn("peer", "10.0.0.2:7400", "missed pings", "missed=%d", n);
 *   -> "<4>peer 10.0.0.2:7400: missed pings missed=4"
 *
 * error = something died; warn = odd but served; info = room and peer life; debug, trace
 * = grows with objects, with chunks. Every call site is limited to LOG_BURST lines a
 * second; its next line carries the number of dropped lines. Any thread may log.
 */
#ifndef KVD_BASE_LOG_H
#define KVD_BASE_LOG_H

#include <stdint.h>

enum log_level {
	LOG_LEVEL_ERROR,
	LOG_LEVEL_WARN,
	LOG_LEVEL_INFO,
	LOG_LEVEL_DEBUG,
	LOG_LEVEL_TRACE
};
#define LOG_BURST 50u

/* journal: "<N>" in front, the journal adds the time. plain: local time and the level's
 * name, for a terminal or a file. auto is only a value of the option. */
enum log_format { LOG_FORMAT_JOURNAL, LOG_FORMAT_PLAIN, LOG_FORMAT_AUTO };

struct log_site {
	uint64_t second;
	uint32_t lines, dropped;
};

extern int log_threshold; /* enum log_level; read without a lock */

void log_set_level(enum log_level level);
void log_set_format(enum log_format format); /* not LOG_FORMAT_AUTO */
/* journal, when stderr is the stream that the journal gave us (JOURNAL_STREAM). */
enum log_format log_format_of_stderr(void);
int log_level_parse(const char *s, enum log_level *level_p); /* ERR_INVAL */
const char *log_level_name(enum log_level level);
/*
 * Fields of the journal's own, for `journalctl KVD_ROOM=42`: a line that has some is sent
 * to journald's socket as one datagram, if it exists, else to stderr like any other.
 * Called when stderr is the journal's stream; `path` NULL: journald's. At most once.
 */
void log_journal_open(const char *path);
struct log_field {
	const char *name; /* upper case; NULL behind the last */
	const char *value;
};
void log_write(struct log_site *site, enum log_level level,
	       const struct log_field *fields, const char *subsystem, const char *object,
	       const char *text, const char *fmt, ...)
	__attribute__((format(printf, 7, 8)));

#define LOG_FIELDS_AT(level, fields, subsystem, object, text, ...)                \
	do {                                                                      \
		static struct log_site site_;                                     \
		if ((int)(level) <= log_threshold)                                \
			log_write(&site_, level, fields, subsystem, object, text, \
				  __VA_ARGS__);                                   \
	} while (0)
#define LOG_AT(level, ...) LOG_FIELDS_AT(level, NULL, __VA_ARGS__)
/* object may be NULL; the last argument list is "key=%…" with values, or "" */
#define log_error(...) LOG_AT(LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warn(...) LOG_AT(LOG_LEVEL_WARN, __VA_ARGS__)
#define log_info(...) LOG_AT(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(...) LOG_AT(LOG_LEVEL_DEBUG, __VA_ARGS__)
#define log_trace(...) LOG_AT(LOG_LEVEL_TRACE, __VA_ARGS__)

#endif
