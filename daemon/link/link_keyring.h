/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link_keyring: all known keys: this daemon's own, those of the allow-list (link_curve.h)
 * and those of the daemons of this user and host (link_keydir.h); and endpoints,
 * tcp://HOST:PORT[#KEY], which name one.
 */
#ifndef KVD_LINK_KEYRING_H
#define KVD_LINK_KEYRING_H

#include <stdbool.h>

#include "daemon/link/link.h"
#include "daemon/link/link_curve.h"

struct config;
struct link_keydir;

struct link_keyring {
	bool curve;	 /* there are keys; else insecure = yes */
	const char *own; /* this daemon's endpoint for peers; set by the owner */
	struct curve_keys keys;
	char name[LINK_USER_MAX]; /* this daemon's, for the lists of others */
	/* for the allow-lists of others: NAME KEY HOST:PORT */
	char line[LINK_USER_MAX + LINK_ENDPOINT_MAX + CURVE_KEY_CHARS];
	struct curve_allow *allow;
	struct link_keydir *keydir;	/* NULL: the keys are from files */
	const struct link_vouch *vouch; /* link.h; NULL: no attested keys */
};

struct link_endpoint {
	char plain[LINK_ENDPOINT_MAX]; /* tcp://host:port, as endpoint_spell() */
	char host[LINK_ENDPOINT_MAX], port[ENDPOINT_PORT_MAX];
	const char *key; /* from the caller's text, or found; NULL: none */
	char found[CURVE_KEY_CHARS + 1];
};

/* ERR_CONFIG, ERR_BUSY: as link_keydir_new(). Without keys nothing is opened. */
int link_keyring_open(struct link_keyring *ring, const struct config *config);
void link_keyring_close(struct link_keyring *ring);
/* Reload the allow file; without `apply` the changes are only reported. */
int link_keyring_reload(struct link_keyring *ring, const char *allow_file, bool apply,
			struct curve_changes *changes_p);
/* The endpoint for peers of a daemon that listens at `bound`: that, or `advertise`, with
 * port and key. Publishes its line for the daemons of this user and host. ERR_CONFIG. */
int link_keyring_endpoint(struct link_keyring *ring, const struct config *config,
			  const char *bound, char endpoint[LINK_ENDPOINT_MAX]);
/* As curve_zap_args.who; `owner` is the keyring. Keys that are not listed are marked. */
bool link_keyring_who(void *owner, const char *key, char name[LINK_USER_MAX],
		      const char **mark_p);

/* As curve_zap_args.ask. */
bool link_keyring_ask(void *owner, const char *key);

/* ERR_INVAL. */
int link_endpoint_parse(const char *text, struct link_endpoint *e);
/* positive outcome: no key is trusted yet; a daemon of this user may start there, or the
 * directory is queried for e->key */
#define LINK_KEY_UNKNOWN 1
/* The key to expect at the endpoint: e->key, NULL without keys. ERR_AUTH: no key is
 * known, or the endpoint may not be dialled; the text names the missing line and its
 * host. */
int link_endpoint_key(struct link_keyring *ring, struct link_endpoint *e);
/* link_ops.recheck. */
int link_endpoint_recheck(struct link_keyring *ring, const struct link_endpoint *e,
			  const char *user, bool hosts);
/* link_ops.may_answer. */
int link_endpoint_check_user(struct link_keyring *ring, const struct link_endpoint *e,
			     const char *user);

#endif
