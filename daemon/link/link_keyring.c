/* SPDX-License-Identifier: Apache-2.0 */
/*
 * With keys an endpoint is tcp://HOST:PORT#KEY: to dial, the key of the expected daemon
 * must be known. A key in the text must be known, too, so a wrong one in a message leads
 * at worst to no connection. Without a key in the text, it is that of the daemon that has
 * published the address, on this host or in the allow-list; a daemon of this user that
 * has not started yet has none, and is looked up again.
 *
 * The layers above treat a name as a user. Names of the list and of daemons of this user
 * may collide; the latter can read this daemon's key, so there is nothing to protect from
 * them.
 */
#include "daemon/link/link_keyring.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <zmq.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/config/config.h"
#include "daemon/link/link_keydir.h"

#define MARK_BESIDE "beside"	    /* admitted by keydir, not by the list */
#define MARK_DIRECTORY "directory"  /* admitted by the cluster's directory */
#define USER_DIRECTORY "directory:" /* prefix of the key of such a daemon */
#define SCHEME_CHARS 6u		    /* tcp:// */

/* ---- opening ---- */

/* `path` "": an empty one. */
static int allow_open(const char *path, struct curve_allow **allow_p)
{
	if (*path)
		return err_pass(curve_allow_load(path, allow_p));
	*allow_p = curve_allow_new();
	return *allow_p ? 0 : err_pass(-ENOMEM);
}

/* A list that was assembled from daemons of one name on many hosts. */
static void warn_shared(const struct curve_allow *allow, const char *path)
{
	unsigned int keys;
	const char *name = curve_allow_shared(allow, &keys);

	if (name)
		log_warn("link", path, "several keys with one name",
			 "name='%s' keys=%u why=\"" CURVE_SHARED_WHY "\"", name, keys);
}

int link_keyring_open(struct link_keyring *ring, const struct config *config)
{
	int r;

	link_keydir_name(config->name, ring->name);
	if (config->insecure && !*config->curve_secret_file)
		return 0;
	if (!zmq_has("curve"))
		return err_raise(ERR_CONFIG, "this libzmq was built without CURVE; set "
					     "insecure = yes to run without keys");
	/* Without a hand-made file the pair is in keys_dir, or is created there. */
	r = *config->curve_secret_file
		    ? curve_keys_load(config->curve_secret_file, &ring->keys)
		    : link_keydir_new(config, &ring->keys, &ring->keydir);
	if (r == 0)
		r = allow_open(config->curve_allow_file, &ring->allow);
	ring->curve = r == 0;
	if (r == 0)
		warn_shared(ring->allow, config->curve_allow_file);
	return err_pass(r);
}

void link_keyring_close(struct link_keyring *ring)
{
	link_keydir_free(ring->keydir);
	curve_allow_free(ring->allow);
	curve_keys_wipe(&ring->keys);
}

int link_keyring_reload(struct link_keyring *ring, const char *allow_file, bool apply,
			struct curve_changes *changes_p)
{
	struct curve_allow *fresh;
	int r;

	*changes_p = (struct curve_changes){0};
	if (!ring->curve)
		return 0;
	r = allow_open(allow_file, &fresh);
	if (r < 0)
		return err_pass(r);
	curve_allow_compare(ring->allow, fresh, changes_p);
	if (apply)
		warn_shared(fresh, allow_file);
	if (!apply) {
		curve_allow_free(fresh);
		return 0;
	}
	log_info("link", *allow_file ? allow_file : NULL, "allow-list reloaded",
		 "keys=%u added=%u removed=%u changed=%u", changes_p->keys,
		 changes_p->added, changes_p->removed, changes_p->changed);
	curve_allow_free(ring->allow);
	ring->allow = fresh;
	return 0;
}

/* In addition to the advertised address, daemons of this host may dial the bound one,
 * and loopback if that is included. */
static void keyring_show(struct link_keyring *ring, const struct link_endpoint *told,
			 const struct link_endpoint *bound)
{
	bool any =
		strcmp(bound->host, "0.0.0.0") == 0 || strcmp(bound->host, "[::]") == 0;
	char line[sizeof(ring->line) + LINK_ENDPOINT_MAX + 64];
	int n;

	snprintf(ring->line, sizeof(ring->line), "%s %s %s", ring->name,
		 ring->keys.public_key, told->plain + SCHEME_CHARS);
	if (!ring->keydir)
		return;
	n = snprintf(line, sizeof(line), "%s", ring->line);
	if (strcmp(told->plain, bound->plain) != 0 && !any)
		n += snprintf(line + n, sizeof(line) - (size_t)n, " %s",
			      bound->plain + SCHEME_CHARS);
	if (any && strcmp(told->host, "127.0.0.1") != 0)
		n += snprintf(line + n, sizeof(line) - (size_t)n, " 127.0.0.1:%s",
			      bound->port);
	if ((any || strcmp(bound->host, "127.0.0.1") == 0) &&
	    strcmp(told->host, "localhost") != 0)
		snprintf(line + n, sizeof(line) - (size_t)n, " localhost:%s",
			 bound->port);
	link_keydir_show(ring->keydir, ring->keys.public_key, line);
}

bool link_keyring_who(void *owner, const char *key, char name[LINK_USER_MAX],
		      const char **mark_p)
{
	struct link_keyring *ring = owner;
	const char *listed = curve_allow_name(ring->allow, key);

	*mark_p = listed ? NULL : MARK_BESIDE;
	if (listed) {
		snprintf(name, LINK_USER_MAX, "%s", listed);
		return true;
	}
	if (link_keydir_find(ring->keydir, key, name))
		return true;
	if (!ring->vouch || !ring->vouch->knows(ring->vouch->owner, key))
		return false;
	/* a user for each key: names in the list cannot look like this */
	snprintf(name, LINK_USER_MAX, USER_DIRECTORY "%s", key);
	*mark_p = MARK_DIRECTORY;
	return true;
}

bool link_keyring_ask(void *owner, const char *key)
{
	struct link_keyring *ring = owner;

	return ring->vouch && ring->vouch->ask(ring->vouch->owner, key);
}

static bool keyring_at(struct link_keyring *ring, const struct link_endpoint *e,
		       const char *mark)
{
	if (!mark)
		return curve_allow_at(ring->allow, e->key, e->host, e->port);
	if (strcmp(mark, MARK_DIRECTORY) == 0)
		return ring->vouch->at(ring->vouch->owner, e->key, e->plain);
	return link_keydir_tells(ring->keydir, e->key, e->host, e->port);
}

/* ---- endpoints ---- */

int link_endpoint_parse(const char *text, struct link_endpoint *e)
{
	const char *hash = strchr(text, '#');
	int r = endpoint_canon(text, e->plain);

	if (r == 0)
		e->plain[strcspn(e->plain, "#")] = '\0';
	if (r == 0)
		r = endpoint_spell(e->plain, e->host, e->port);
	if (r < 0)
		return err_pass(r);
	e->key = hash ? hash + 1 : NULL;
	if (e->key && !curve_key_check(e->key, strlen(e->key)))
		return err_raise(ERR_INVAL,
				 "endpoint '%s': the text after '#' is not a key of 40 "
				 "characters",
				 text);
	return 0;
}

/* The given key, our own, that of a daemon of this user, or by the hosts of the allow
 * file. */
static const char *find_key(struct link_keyring *ring, struct link_endpoint *e)
{
	size_t own_len = strcspn(ring->own, "#");
	const char *key;

	if (strlen(e->plain) == own_len && memcmp(e->plain, ring->own, own_len) == 0)
		return ring->keys.public_key;
	if (e->key)
		return e->key;
	key = curve_allow_key(ring->allow, e->host, e->port);
	if (!key && link_keydir_at(ring->keydir, e->host, e->port, e->found))
		key = e->found;
	return key;
}

int link_endpoint_key(struct link_keyring *ring, struct link_endpoint *e)
{
	char name[LINK_USER_MAX];
	const char *mark;

	if (!ring->curve)
		return e->key ? err_raise(ERR_AUTH,
					  "endpoint '%s' has a CURVE key, but this "
					  "daemon has none (insecure = yes)",
					  e->plain)
			      : 0;
	e->key = find_key(ring, e);
	if (!e->key && ring->keydir)
		return LINK_KEY_UNKNOWN;
	if (!e->key)
		return err_raise(ERR_AUTH,
				 "endpoint '%s': unknown key; append '#' and its key to "
				 "the endpoint, or add its line, NAME KEY %s, to "
				 "curve_allow_file here (kvd-ctl keys prints it there)",
				 e->plain, e->plain + SCHEME_CHARS);
	if (e->key == ring->keys.public_key ||
	    link_keydir_seen(ring->keydir, e->key) || /* the usual case; opens no file */
	    link_keyring_who(ring, e->key, name, &mark))
		return 0;
	if (link_keyring_ask(ring, e->key))
		return LINK_KEY_UNKNOWN;
	if (link_keyring_who(ring, e->key, name, &mark)) /* a cached entry has it */
		return 0;
	return err_raise(ERR_AUTH,
			 "endpoint '%s': key neither of a daemon of this host and user "
			 "nor in curve_allow_file; add 'NAME %.40s %s' here, and '%s' "
			 "there",
			 e->plain, e->key, e->plain + SCHEME_CHARS, ring->line);
}

int link_endpoint_check_user(struct link_keyring *ring, const struct link_endpoint *e,
			     const char *user)
{
	char name[LINK_USER_MAX];
	const char *mark;

	if (!ring->curve)
		return 0;
	if (!e->key || !link_keyring_who(ring, e->key, name, &mark) ||
	    strcmp(name, user) != 0)
		return err_raise(ERR_AUTH, "endpoint '%s': not the key of '%s'", e->plain,
				 user);
	if (keyring_at(ring, e, mark))
		return 0;
	return err_raise(ERR_AUTH,
			 "'%s' advertises '%s', which its line in curve_allow_file does "
			 "not list",
			 user, e->plain);
}

int link_endpoint_recheck(struct link_keyring *ring, const struct link_endpoint *e,
			  const char *user, bool hosts)
{
	char beside[LINK_USER_MAX];
	const char *listed, *name;

	if (!ring->curve || !e->key)
		return 0;
	name = listed = curve_allow_name(ring->allow, e->key);
	if (!name && link_keydir_find(ring->keydir, e->key, beside))
		name = beside;
	/* a reload does not change the entries of the directory */
	if (!name && strncmp(user, USER_DIRECTORY, strlen(USER_DIRECTORY)) == 0)
		return 0;
	if (!name && !*user && ring->vouch &&
	    ring->vouch->knows(ring->vouch->owner, e->key))
		return 0;
	if (!name)
		return err_raise(ERR_AUTH, "its key was removed from curve_allow_file");
	if (*user && strcmp(name, user) != 0)
		return err_raise(ERR_AUTH,
				 "its key now has the name '%s' (curve_allow_file)",
				 name);
	if (hosts && listed && !curve_allow_at(ring->allow, e->key, e->host, e->port))
		return err_raise(ERR_AUTH,
				 "its line in curve_allow_file no longer lists %s",
				 e->plain);
	return 0;
}

int link_keyring_endpoint(struct link_keyring *ring, const struct config *config,
			  const char *bound, char endpoint[LINK_ENDPOINT_MAX])
{
	const char *told = *config->advertise ? config->advertise : bound, *colon, *port;
	struct link_endpoint e, at;
	int n, r = link_endpoint_parse(bound, &at);

	if (r < 0)
		return err_pass(r);
	colon = strrchr(told, ':');
	port = colon ? colon + 1 : "";
	if (strcmp(port, "0") == 0 || strcmp(port, "*") == 0)
		port = at.port;
	n = snprintf(endpoint, LINK_ENDPOINT_MAX, "%.*s%s",
		     colon ? (int)(colon + 1 - told) : 0, told, port);
	r = n < LINK_ENDPOINT_MAX ? link_endpoint_parse(endpoint, &e) : -1;
	if (r == 0) /* as canonical spells it */
		n = snprintf(endpoint, LINK_ENDPOINT_MAX, "%s%s%s", e.plain,
			     ring->curve ? "#" : "", ring->keys.public_key);
	if (r < 0 || e.key || n >= LINK_ENDPOINT_MAX)
		return err_raise(ERR_CONFIG, "advertise = %s: must be tcp://HOST:PORT",
				 told);
	if (strcmp(e.host, "0.0.0.0") == 0 || strcmp(e.host, "[::]") == 0)
		return err_raise(ERR_CONFIG,
				 "listen = %s: peers cannot connect to this address; "
				 "set advertise",
				 config->listen);
	if (ring->curve)
		keyring_show(ring, &e, &at);
	return 0;
}
