/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link_curve: the CURVE keys of the daemons that may connect.
 *
 * The secret file holds this daemon's secret key (40 characters Z85, as `kvd-ctl keygen`
 * writes it) on its own line; only its owner may read it. The allow file holds a line for
 * each daemon:
 *
 *   NAME PUBLIC-KEY [HOST | HOST:PORT]...
 *
 * NAME is the user id of link frames. HOST lists the hosts that may be dialled as
 * plain tcp://HOST:PORT; an endpoint that names its key, tcp://HOST:PORT#PUBLIC-KEY,
 * needs none. Empty lines and lines that start with '#' are skipped. A daemon that is
 * not listed can neither dial nor be dialled.
 */
#ifndef KVD_LINK_CURVE_H
#define KVD_LINK_CURVE_H

#include <stdbool.h>
#include <stddef.h>

#include "daemon/link/link.h"

#define CURVE_KEY_CHARS 40u /* Z85 */

struct curve_keys {
	char public_key[CURVE_KEY_CHARS + 1];
	char secret_key[CURVE_KEY_CHARS + 1];
};

struct curve_allow; /* the allow file, loaded */

/* ERR_CONFIG: "file:line: fault". The public key is computed from the secret. */
int curve_keys_load(const char *path, struct curve_keys *keys_p);
void curve_keys_wipe(struct curve_keys *keys);
/* Is it 40 characters of the Z85 alphabet? */
bool curve_key_check(const char *key, size_t len);

int curve_allow_load(const char *path, struct curve_allow **allow_p);
struct curve_allow *curve_allow_new(void); /* empty; NULL: no memory */
/* Parse a line; its text is modified. ERR_CONFIG, ERR_NOMEM. */
int curve_allow_add(struct curve_allow *allow, char *line);
void curve_allow_free(struct curve_allow *allow); /* NULL is fine */
/* The name of a key's owner, NULL when the key is not allowed. */
const char *curve_allow_name(const struct curve_allow *allow, const char *public_key);
/* A name with several keys, and their number; NULL: each name has one. */
const char *curve_allow_shared(const struct curve_allow *allow, unsigned int *keys_p);
#define CURVE_SHARED_WHY                                                             \
	"daemons with one name count as one user and share rooms without a ticket; " \
	"give each its own name, as kvd-ctl keys prints it"
/* Differences of a list from an older one; a changed line has another name or other
 * hosts for its key. */
struct curve_changes {
	unsigned int keys, added, removed, changed;
};
void curve_allow_compare(const struct curve_allow *before,
			 const struct curve_allow *after,
			 struct curve_changes *changes_p);
/* The expected key at host:port, NULL when no line names it. HOST:PORT takes
 * precedence over HOST. */
const char *curve_allow_key(const struct curve_allow *allow, const char *host,
			    const char *port);

/* May the daemon with that key be at host:port? Its line names no host, or this one. */
bool curve_allow_at(const struct curve_allow *allow, const char *key, const char *host,
		    const char *port);

/* Every line of the list. */
void curve_allow_each(const struct curve_allow *allow,
		      void (*each)(void *arg, const char *name, const char *key),
		      void *arg);

struct loop;
struct curve_zap;
struct link_refusals;
struct curve_zap_args {
	struct loop *loop;
	void *context; /* ZeroMQ's */
	void *owner;
	/* The owner of a key. False: the key is not allowed. Frames of the connection
	 * carry the name, and `mark` (a static string) if set. */
	bool (*who)(void *owner, const char *key, char name[LINK_USER_MAX],
		    const char **mark_p);
	/* For an unknown key: may who() find it soon? It is asked again by
	 * curve_zap_look() and after CURVE_WAIT_NS, and then refused. NULL: no. */
	bool (*ask)(void *owner, const char *key);
	struct link_refusals *refusals; /* refused keys */
};
#define CURVE_WAIT_NS (3 * LOOP_NS_PER_S) /* a quarter of libzmq's handshake timeout */
/* Properties of a message: the mark, if any, and the key of its connection. */
#define CURVE_MARK "X-Kvd-Mark"
#define CURVE_KEY "X-Kvd-Key"
/* Answers libzmq's authentication requests of one context, on the loop. Must be
 * made before the first listening socket. */
int curve_zap_new(const struct curve_zap_args *args, struct curve_zap **zap_p);
void curve_zap_free(struct curve_zap *zap);
/* Check waiting keys again: some may be known now. */
void curve_zap_look(struct curve_zap *zap);

#endif
