/* SPDX-License-Identifier: Apache-2.0 */
/*
 * err: one record of a fault, made by the first function that knows its cause.
 *
 * A function returns 0 (ok), a negative errno (unexpected: the record is set) or a
 * positive outcome that its own header names. The function that detects the fault calls
 * err_raise(), which fills this thread's record and returns the negative errno of the
 * code; callers pass the number on with err_pass(). A reply, a room or an op that must
 * keep the fault copies the record with err_take().
 *
 * Codes are stable: they appear in replies, in `failed` rooms and in the reference page
 * as "E" + name. Add new ones at the end and never renumber: the number is sent between
 * daemons and stored in the status page.
 */
#ifndef KVD_BASE_ERR_H
#define KVD_BASE_ERR_H

#include <stdbool.h>
#include <stdint.h>

/* The scope of a fault; only the owner of a scope may widen it. */
enum err_scope {
	ERR_SCOPE_OP,
	ERR_SCOPE_ROOM,
	ERR_SCOPE_PEER,
	ERR_SCOPE_SESSION,
	ERR_SCOPE_DEVICE,
	ERR_SCOPE_DAEMON,
};

/* X(number, name, errno, scope, retryable, meaning, remedy): the remedy is one line
 * for operators; docs/clients.md has the advice for programs. */
#define ERR_CODES(X)                                                                     \
	X(1, INVAL, EINVAL, OP, false, "a field has a value outside its limits",         \
	  "use a value within the limits that the message gives")                        \
	X(2, PROTO, EPROTO, SESSION, false, "a message breaks the protocol",             \
	  "use the same release of the engine's libkvd and the daemon")                  \
	X(3, TOOBIG, EMSGSIZE, OP, false, "a line, list or frame exceeds its limit",     \
	  "send less at a time, or raise the option `message`")                          \
	X(4, NOCMD, ENOSYS, OP, false, "no such command",                                \
	  "upgrade the daemon, or use kvd-ctl of the daemon's version")                  \
	X(5, PERM, EPERM, OP, false, "permission denied",                                \
	  "run as root or as the daemon's user, or add the uid to admin_uids or "        \
	  "allow_uids")                                                                  \
	X(6, NOTFOUND, ENOENT, OP, false, "no such object in this session",              \
	  "it has ended or belongs to another session: kvd-ctl room N, kvd-ctl "         \
	  "history")                                                                     \
	X(7, EXIST, EEXIST, OP, false, "already exists with different contents",         \
	  "close or unregister the old one first")                                       \
	X(8, BUSY, EBUSY, OP, true, "in use now", "retry after its users have ended")    \
	X(9, LIMIT, EUSERS, OP, true, "a configured limit is reached",                   \
	  "raise the option that the message names, or close unused objects")            \
	X(10, NOMEM, ENOMEM, OP, true, "out of memory",                                  \
	  "raise MemoryMax= of the service or the memory limit of the container")        \
	X(11, STATE, EBADFD, OP, false, "not allowed in the current state",              \
	  "the engine made calls in the wrong order: see the message")                   \
	X(12, LAYOUT, EBADSLT, ROOM, false, "the layouts of the two sides do not match", \
	  "compare models and cache settings of the engines: kvd-ctl pools on both")     \
	X(13, COVER, ENODATA, ROOM, false, "no source holds a requested part",           \
	  "list all ranks of the prefill side as sources")                               \
	X(14, RANGE, ERANGE, OP, false, "out of range of a pool, region or list",        \
	  "the engine used pages outside its pool: check its block table")               \
	X(15, DUP, ENOTUNIQ, ROOM, false, "the same bytes were sent twice",              \
	  "the engine bound a page twice, or sent a chunk again under a new seq")        \
	X(16, SHORT, EREMOTEIO, ROOM, false, "bytes are missing after the last chunk",   \
	  "the prefill engine sent fewer tokens than were bound: check its last chunk")  \
	X(17, ABORTED, ECONNABORTED, ROOM, true, "aborted by an engine",                 \
	  "see the log of the engine that aborted")                                      \
	X(18, PEER, EHOSTDOWN, PEER, true,                                               \
	  "the connection to the remote daemon was lost",                                \
	  "check kvd-ctl peers, the remote daemon's log and load, and the network "      \
	  "between")                                                                     \
	X(19, SESSION, EOWNERDEAD, SESSION, true, "the engine of the object has exited", \
	  "see the engine's log")                                                        \
	X(20, TIMEOUT, ETIMEDOUT, ROOM, true, "a timeout expired",                       \
	  "kvd-ctl room N on both daemons: the message names the side it waited for")    \
	X(21, STALL, ETIME, ROOM, true, "no progress within the stall timeout",          \
	  "check the link to the peer: kvd-ctl doctor on both sides, kvd-ctl bench")     \
	X(22, LEASE, EKEYEXPIRED, ROOM, true, "the lease of the offer has expired",      \
	  "the decode side pulled too late: check its engine, or raise `offer_lease`")   \
	X(23, TRANSPORT, ECOMM, PEER, true, "the transport failed",                      \
	  "check the link and the adapter: kvd-ctl doctor, kvd-ctl devices")             \
	X(24, REQUIRE, EPROTONOSUPPORT, ROOM, false, "no allowed transport",             \
	  "compare `transports` and `require` in kvd-ctl status of both daemons")        \
	X(25, IMPORT, ENOTSUP, OP, false, "this kind of memory is not supported",        \
	  "use memory that kvd can map, such as memfd; for GPUs see kvd-ctl devices")    \
	X(26, FAULT, EFAULT, ROOM, false, "the memory of a region is no longer mapped",  \
	  "the engine freed registered memory, or its memory limit is reached")          \
	X(27, FENCE, EINPROGRESS, PEER, true,                                            \
	  "could not verify in time that I/O has stopped",                               \
	  "the connection was closed for safety: the peer's adapter or host may hang")   \
	X(28, DRAIN, ESHUTDOWN, OP, true, "the daemon is draining",                      \
	  "none: the daemon is shutting down; the router uses other daemons")            \
	X(29, RESTART, ESTALE, PEER, true, "the remote daemon has restarted",            \
	  "none if the restart was intended; otherwise see the remote daemon's log")     \
	X(30, VERSION, ENOPROTOOPT, PEER, false, "no common protocol version",           \
	  "upgrade the daemons, kvd-ctl and the engines' libkvd together")               \
	X(31, AUTH, EKEYREJECTED, PEER, false, "not authenticated",                      \
	  "compare keys and allow-lists: kvd-ctl keys on both sides")                    \
	X(32, CANCELED, ECANCELED, OP, true, "canceled by its owner",                    \
	  "none: canceled on request")                                                   \
	X(33, PLAN, EILSEQ, ROOM, false, "the plans of the two sides differ",            \
	  "run the same release on both daemons; if they do, report a bug")              \
	X(34, REVOKED, EKEYREVOKED, OP, false, "the memory is no longer exported",       \
	  "the owner unregistered the memory while it was in use")                       \
	X(35, CONFIG, EDOM, DAEMON, false, "the configuration is not usable",            \
	  "kvd --check-config shows file and line")                                      \
	X(36, IO, EIO, DEVICE, true, "the operating system returned an error",           \
	  "see the system's text in the message, kvd-ctl doctor and the kernel log")     \
	X(37, INTERNAL, ENOTRECOVERABLE, OP, false, "internal error",                    \
	  "report a bug and attach the daemon's log")

enum err_code {
	ERR_OK = 0,
#define ERR_ENUM(num, name, no, scope, retry, text, remedy) ERR_##name = (num),
	ERR_CODES(ERR_ENUM)
#undef ERR_ENUM
		ERR_CODE_END,
};

#define ERR_TEXT_MAX 320

struct err {
	enum err_code code;
	enum err_scope scope;
	bool retryable;
	char text[ERR_TEXT_MAX]; /* one line, names the field and the limit */
};

/* Record a fault for this thread and return its negative errno. Scope and
 * retryable come from the code's table row. */
int err_raise(enum err_code code, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));
/* The same for a failed system call: "<what>: <strerror(no)>", with ERR_IO, or
 * ERR_NOMEM / ERR_LIMIT according to `no`. */
int err_raise_errno(int no, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Pass a negative result on; asserts that a fault was raised. */
void err_assert_raised(int r);
static inline int err_pass(int r) /* inline: analysers see that r stays r */
{
	err_assert_raised(r);
	return r;
}
/* Put "<context>: " before the recorded text (context a caller adds once). */
int err_prefix(int r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* This thread's record; code ERR_OK when none was raised since err_clear(). */
const struct err *err_last(void);
void err_clear(void);
/* Copy the record out and clear it. */
void err_take(struct err *dst);
/* Make a record without raising it. */
void err_set(struct err *dst, enum err_code code, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
/* Raise a record that was taken elsewhere (another thread, an op). */
int err_reraise(const struct err *src);

#ifdef __clang_analyzer__
/* Static analysers do not see into err.c: state that a fault is negative. */
#define ERR_NEGATIVE(call)                       \
	({                                       \
		int negative_ = (call);          \
		if (negative_ >= 0)              \
			__builtin_unreachable(); \
		negative_;                       \
	})
#define err_raise(...) ERR_NEGATIVE((err_raise)(__VA_ARGS__))
#define err_raise_errno(...) ERR_NEGATIVE((err_raise_errno)(__VA_ARGS__))
#define err_reraise(src) ERR_NEGATIVE((err_reraise)(src))
#endif

/* "EINVAL"…; "EINTERNAL" for a number that is no code. Never NULL. */
const char *err_name(enum err_code code);
const char *err_meaning(enum err_code code);
const char *err_remedy(enum err_code code);
/* "ETIMEOUT" to its code; ERR_INTERNAL for an unknown name. */
enum err_code err_of_name(const char *name);
const char *err_scope_name(enum err_scope scope);
enum err_scope err_default_scope(enum err_code code);
bool err_default_retryable(enum err_code code);
int err_errno(enum err_code code); /* positive errno of the table */
/* For a failed connect(), with a remedy. */
const char *err_connect_words(int no);
/* A number from the wire to a code; unknown numbers become ERR_INTERNAL. */
enum err_code err_from_wire(uint32_t n);
/* The record of a fault that another daemon reports. A fault of its device, or of all
 * of it, costs a room here and nothing else of this daemon. */
void err_foreign(struct err *err);

#endif
