/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One record a thread, filled from one table. The record is of fixed size, so that
 * reporting a fault never allocates: "out of memory" must be reportable too. An argument
 * of err_raise() may be the old record's own text, so the new text is built in a separate
 * buffer first. Numbers are for the wire and the status page, names for replies, errno
 * values for callers in C; the table holds all three together.
 */
#include "daemon/base/err.h"

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct row {
	const char *name;
	const char *meaning, *remedy;
	int no;
	enum err_scope scope;
	bool retryable;
};

static const struct row rows[ERR_CODE_END] = {
#define ERR_ROW(num, nm, err_no, sc, retry, text, cure) \
	[num] = {.name = "E" #nm,                       \
		 .meaning = (text),                     \
		 .remedy = (cure),                      \
		 .no = (err_no),                        \
		 .scope = ERR_SCOPE_##sc,               \
		 .retryable = (retry)},
	ERR_CODES(ERR_ROW)
#undef ERR_ROW
};

static _Thread_local struct err last;

static const struct row *err_row_of(enum err_code code)
{
	if ((unsigned int)code == 0 || (unsigned int)code >= ERR_CODE_END)
		code = ERR_INTERNAL;
	return &rows[code];
}

static void err_fill(struct err *e, enum err_code code)
{
	const struct row *row = err_row_of(code);

	e->code = code;
	e->scope = row->scope;
	e->retryable = row->retryable;
}

#define WORD_MAX 64u

/* Text that does not fit is cut after a whole word, with dots: half a word misleads. */
static void err_fit(char text[ERR_TEXT_MAX], const char *whole)
{
	const size_t most = ERR_TEXT_MAX - sizeof("...");
	size_t len = strlen(whole), at = most;

	if (len < ERR_TEXT_MAX) {
		memcpy(text, whole, len + 1);
		return;
	}
	while (whole[at] != ' ' && most - at < WORD_MAX)
		at--;
	if (whole[at] != ' ') /* one long word: not within a character */
		for (at = most; ((unsigned char)whole[at] & 0xc0) == 0x80;)
			at--;
	memcpy(text, whole, at);
	memcpy(text + at, "...", sizeof("..."));
}

__attribute__((format(printf, 2, 0))) static void err_text(char text[ERR_TEXT_MAX],
							   const char *fmt, va_list ap)
{
	char whole[3 * ERR_TEXT_MAX]; /* an argument may be the old record's text */

	vsnprintf(whole, sizeof(whole), fmt, ap);
	err_fit(text, whole);
}

int(err_raise)(enum err_code code, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	err_text(last.text, fmt, ap);
	va_end(ap);
	err_fill(&last, code);
	return -err_row_of(code)->no;
}

int(err_raise_errno)(int no, const char *fmt, ...)
{
	char text[ERR_TEXT_MAX];
	char reason[80];
	enum err_code code = ERR_IO;
	va_list ap;

	if (no == ENOMEM)
		code = ERR_NOMEM;
	else if (no == EMFILE || no == ENFILE || no == EAGAIN)
		code = ERR_LIMIT;
	else if (no == EPERM || no == EACCES)
		code = ERR_PERM;
	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	return err_raise(code, "%.220s: %s", text,
			 strerror_r(no, reason, sizeof(reason)));
}

/* systemd's filter drops packets, and connect() gets no error. systemd(1) sets
 * INVOCATION_ID in units only. */
const char *err_connect_words(int no)
{
	if (no != ETIMEDOUT)
		return strerror(no);
	return getenv("INVOCATION_ID")
		       ? "Connection timed out: a firewall, or IPAddressAllow= of "
			 "kvd's unit, here or there"
		       : "Connection timed out: a firewall, here or there";
}

void err_assert_raised(int r)
{
	assert(r >= 0 || last.code != ERR_OK);
}

int err_prefix(int r, const char *fmt, ...)
{
	char text[ERR_TEXT_MAX];
	char joined[2 * ERR_TEXT_MAX + 2];
	va_list ap;

	if (r >= 0)
		return r;
	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	snprintf(joined, sizeof(joined), "%s: %s", text, last.text);
	err_fit(last.text, joined);
	return r;
}

const struct err *err_last(void)
{
	return &last;
}

void err_clear(void)
{
	last.code = ERR_OK;
	last.text[0] = '\0';
}

void err_take(struct err *dst)
{
	*dst = last;
	err_clear();
}

void err_set(struct err *dst, enum err_code code, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	err_text(dst->text, fmt, ap);
	va_end(ap);
	err_fill(dst, code);
}

int(err_reraise)(const struct err *src)
{
	last = *src;
	return -err_row_of(src->code)->no;
}

const char *err_name(enum err_code code)
{
	return code == ERR_OK ? "OK" : err_row_of(code)->name;
}

const char *err_meaning(enum err_code code)
{
	return code == ERR_OK ? "no error" : err_row_of(code)->meaning;
}

const char *err_remedy(enum err_code code)
{
	return code == ERR_OK ? "none" : err_row_of(code)->remedy;
}

enum err_code err_of_name(const char *name)
{
	for (int code = 1; code < ERR_CODE_END; code++)
		if (strcmp(rows[code].name, name) == 0)
			return (enum err_code)code;
	return ERR_INTERNAL;
}

const char *err_scope_name(enum err_scope scope)
{
	static const char *const names[] = {"op",      "room",	 "peer",
					    "session", "device", "daemon"};

	assert((unsigned int)scope < sizeof(names) / sizeof(names[0]));
	return names[scope];
}

enum err_scope err_default_scope(enum err_code code)
{
	return err_row_of(code)->scope;
}

bool err_default_retryable(enum err_code code)
{
	return err_row_of(code)->retryable;
}

int err_errno(enum err_code code)
{
	return err_row_of(code)->no;
}

enum err_code err_from_wire(uint32_t n)
{
	return n < ERR_CODE_END ? (enum err_code)n : ERR_INTERNAL;
}

void err_foreign(struct err *err)
{
	if (err->scope == ERR_SCOPE_DEVICE || err->scope == ERR_SCOPE_DAEMON)
		err->scope = ERR_SCOPE_ROOM;
}
