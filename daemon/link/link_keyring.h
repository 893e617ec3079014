/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link_keyring: which key is whose: this daemon's own, those of the allow-list
 * (link_curve.h), those of the daemons beside it (link_keydir.h); and endpoints,
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
	const char *own; /* the endpoint that others are told; set by the owner */
	struct curve_keys keys;
	char name[LINK_USER_MAX]; /* this daemon's, for the lists of others */
	/* for the allow-lists of others: NAME KEY HOST:PORT */
	char line[LINK_USER_MAX + LINK_ENDPOINT_MAX + CURVE_KEY_CHARS];
	struct curve_allow *allow;
	struct link_keydir *keydir;	/* NULL: the keys are those of files */
	const struct link_vouch *vouch; /* link.h; NULL: nobody vouches for others */
};

struct link_endpoint {
	char plain[LINK_ENDPOINT_MAX]; /* tcp://host:port, as endpoint_spell() */
	char host[LINK_ENDPOINT_MAX], port[ENDPOINT_PORT_MAX];
	const char *key; /* in the caller's text, or found; NULL: none */
	char found[CURVE_KEY_CHARS + 1];
};

/* ERR_CONFIG, ERR_BUSY: as link_keydir_new(). Without keys nothing is opened. */
int link_keyring_open(struct link_keyring *ring, const struct config *config);
void link_keyring_close(struct link_keyring *ring);
/* The allow file anew; without `apply` only what differs is told. */
int link_keyring_reload(struct link_keyring *ring, const char *allow_file, bool apply,
			struct curve_changes *changes_p);
/* This daemon listens at `bound`, and others are told `told`: its line, which is shown to
 * those beside it. */
void link_keyring_show(struct link_keyring *ring, const struct link_endpoint *told,
		       const struct link_endpoint *bound);
/* As curve_zap_args.who; `owner` is the keyring. Those that are not listed are marked. */
bool link_keyring_who(void *owner, const char *key, char name[LINK_USER_MAX],
		      const char **mark_p);

/* As curve_zap_args.ask. */
bool link_keyring_ask(void *owner, const char *key);

/* ERR_INVAL. */
int link_endpoint_parse(const char *text, struct link_endpoint *e);
/* positive outcome: who is there is not known, and may yet start beside this daemon */
#define LINK_KEY_UNKNOWN 1
/* Which key to expect there: e->key, NULL without keys. ERR_AUTH: that is not known, or
 * it may not be dialled; the text says which line is missing where. */
int link_endpoint_key(struct link_keyring *ring, struct link_endpoint *e);
/* link_ops.recheck. */
int link_endpoint_recheck(struct link_keyring *ring, const struct link_endpoint *e,
			  const char *user, bool hosts);
/* link_ops.may_answer. */
int link_endpoint_check_user(struct link_keyring *ring, const struct link_endpoint *e,
			     const char *user);

#endif
