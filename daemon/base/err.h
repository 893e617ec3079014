/* SPDX-License-Identifier: Apache-2.0 */
/*
 * err: one record of what went wrong, made by the first function that knows the cause.
 *
 * A function returns 0 (ok), a negative errno (unexpected: the record is set) or a
 * positive outcome that its own header names. The function that finds the fault calls
 * err_raise(), which fills this thread's record and returns the negative errno of the
 * code; callers hand the number on with err_pass(). A reply, a room or an op that must
 * keep the fault copies the record with err_take().
 *
 * Codes are stable: they appear in replies, in `failed` rooms and in the
 * reference page as "E" + name. Add at the end, never renumber: the number
 * travels between daemons and lies in the status page.
 */
#ifndef KVD_BASE_ERR_H
#define KVD_BASE_ERR_H

#include <stdbool.h>
#include <stdint.h>

/* How far a fault reaches; only the owner of a scope may widen it. */
enum err_scope {
	ERR_SCOPE_OP,
	ERR_SCOPE_ROOM,
	ERR_SCOPE_PEER,
	ERR_SCOPE_SESSION,
	ERR_SCOPE_DEVICE,
	ERR_SCOPE_DAEMON,
};

/* X(number, name, errno, scope, retryable, meaning, remedy): the remedy is for operators,
 * in one line; docs/clients.md has those for client programmers. */
#define ERR_CODES(X)                                                                    \
	X(1, INVAL, EINVAL, OP, false, "a field has a value outside its limits",        \
	  "the message names the field and what it may be")                             \
	X(2, PROTO, EPROTO, SESSION, false, "a message breaks the protocol",            \
	  "upgrade the engine's libkvd together with the daemon")                       \
	X(3, TOOBIG, EMSGSIZE, OP, false, "a line, list or frame over its cap",         \
	  "send less at a time, or raise the option `message`")                         \
	X(4, NOCMD, ENOSYS, OP, false, "no such command",                               \
	  "upgrade the daemon, or use the kvd-ctl of its version")                      \
	X(5, PERM, EPERM, OP, false, "not allowed for this caller",                     \
	  "be root or the daemon's user, or be in admin_uids or allow_uids")            \
	X(6, NOTFOUND, ENOENT, OP, false, "no such object in this session",             \
	  "it has ended or is of another session: kvd-ctl room N, kvd-ctl history")     \
	X(7, EXIST, EEXIST, OP, false, "exists already, with other content",            \
	  "close or unregister the old one first")                                      \
	X(8, BUSY, EBUSY, OP, true, "in use now",                                       \
	  "try again once what uses it has ended")                                      \
	X(9, LIMIT, EUSERS, OP, true, "a configured cap is reached",                    \
	  "raise the option that the message names, or close what is not used")         \
	X(10, NOMEM, ENOMEM, OP, true, "out of memory",                                 \
	  "raise MemoryMax= of the service or the memory limit of the container")       \
	X(11, STATE, EBADFD, OP, false, "not possible in the object's state",           \
	  "the engine called in the wrong order: see the message")                      \
	X(12, LAYOUT, EBADSLT, ROOM, false, "the two sides' layouts contradict",        \
	  "the engines' models or cache settings differ: kvd-ctl pools on both")        \
	X(13, COVER, ENODATA, ROOM, false, "no source holds a wanted interval",         \
	  "name all ranks of the prefill side as sources")                              \
	X(14, RANGE, ERANGE, OP, false, "outside a pool, region or list",               \
	  "the engine names pages outside its pool: its block table")                   \
	X(15, DUP, ENOTUNIQ, ROOM, false, "the same bytes were sent twice",             \
	  "the engine binds a page twice, or sends a chunk again under a new seq")      \
	X(16, SHORT, EREMOTEIO, ROOM, false, "the last chunk left bytes missing",       \
	  "the prefill engine sent fewer tokens than were bound: its last chunk")       \
	X(17, ABORTED, ECONNABORTED, ROOM, true, "aborted by an engine",                \
	  "the engine that aborted says why: its log")                                  \
	X(18, PEER, EHOSTDOWN, PEER, true, "the remote daemon is gone",                 \
	  "kvd-ctl peers; the other daemon's log and load; the path to it")             \
	X(19, SESSION, EOWNERDEAD, SESSION, true, "the owning engine is gone",          \
	  "the engine ended: its log")                                                  \
	X(20, TIMEOUT, ETIMEDOUT, ROOM, true, "a phase took longer than allowed",       \
	  "kvd-ctl room N on both daemons: the message names whom it waited for")       \
	X(21, STALL, ETIME, ROOM, true, "no byte moved for too long",                   \
	  "look at the link to the peer: kvd-ctl doctor there and here, kvd-ctl bench") \
	X(22, LEASE, EKEYEXPIRED, ROOM, true, "the offer's lease has ended",            \
	  "the decode side pulls too late: its engine, or a longer `offer_lease`")      \
	X(23, TRANSPORT, ECOMM, PEER, true, "the transport failed",                     \
	  "look at the link and the adapter: kvd-ctl doctor, kvd-ctl devices")          \
	X(24, REQUIRE, EPROTONOSUPPORT, ROOM, false, "no allowed transport",            \
	  "compare kvd-ctl status of both daemons: `transports`, `require`")            \
	X(25, IMPORT, ENOTSUP, OP, false, "memory of this kind cannot be used",         \
	  "use memory that kvd can map: memfd; of GPUs: kvd-ctl devices")               \
	X(26, FAULT, EFAULT, ROOM, false, "a region's memory vanished",                 \
	  "the engine took registered memory away, or its limit is full")               \
	X(27, FENCE, EINPROGRESS, PEER, true, "quiet could not be proven in time",      \
	  "the peer's connection was cut for safety: its adapter or host hangs")        \
	X(28, DRAIN, ESHUTDOWN, OP, true, "the daemon is draining",                     \
	  "none: a daemon is on its way out, the router sends elsewhere")               \
	X(29, RESTART, ESTALE, PEER, true, "the other side is a new instance",          \
	  "none, if the other daemon was restarted on purpose; else its log")           \
	X(30, VERSION, ENOPROTOOPT, PEER, false, "no common protocol version",          \
	  "upgrade the daemons, kvd-ctl and the engines' libkvd together")              \
	X(31, AUTH, EKEYREJECTED, PEER, false, "not authenticated",                     \
	  "compare keys and allow-lists: kvd-ctl keys on both sides")                   \
	X(32, CANCELED, ECANCELED, OP, true, "canceled by its owner",                   \
	  "none: its owner wanted so")                                                  \
	X(33, PLAN, EILSEQ, ROOM, false, "the two sides' plans differ",                 \
	  "the two daemons are of different builds: upgrade both; else report it")      \
	X(34, REVOKED, EKEYREVOKED, OP, false, "the memory is no longer exported",      \
	  "the owner unregistered its memory while others used it")                     \
	X(35, CONFIG, EDOM, DAEMON, false, "the configuration is not usable",           \
	  "kvd --check-config names file and line")                                     \
	X(36, IO, EIO, DEVICE, true, "the operating system refused",                    \
	  "the message has the system's words: kvd-ctl doctor, the kernel's log")       \
	X(37, INTERNAL, ENOTRECOVERABLE, OP, false, "a fault of kvd itself",            \
	  "report it with the daemon's log")

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
/* The same, from a failed system call: "<what>: <strerror(no)>", ERR_IO, or ERR_NOMEM /
 * ERR_LIMIT depending on `no`. */
int err_raise_errno(int no, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Hand a negative result on; asserts that an error was raised. */
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
/* An analyser cannot see into err.c: this states that a fault is negative. */
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
/* "ETIMEOUT" to its code; ERR_INTERNAL for a word that is none. */
enum err_code err_of_name(const char *name);
const char *err_scope_name(enum err_scope scope);
enum err_scope err_default_scope(enum err_code code);
bool err_default_retryable(enum err_code code);
int err_errno(enum err_code code); /* positive errno of the table */
/* For a failed connect(), with the remedy. */
const char *err_connect_words(int no);
/* A number off the wire to a code; unknown numbers become ERR_INTERNAL. */
enum err_code err_from_wire(uint32_t n);
/* The record of a fault reported by another daemon: a fault of its device, or of the
 * whole daemon, costs one room here and nothing else. */
void err_foreign(struct err *err);

#endif
