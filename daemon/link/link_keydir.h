/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link_keydir: the key pair of this daemon, created at the first start, and the public
 * keys of the daemons of the same user on the same host, which need no line in an
 * allow-list.
 *
 * Only a user itself can write to a directory that it owns. So a running daemon
 * publishes its key as a file in such directories, and trusts the keys in them as
 * those of its own user, which could read its secret and its memory in any case. A
 * directory that another user owns or may write, or that is a symbolic link, is not
 * used.
 */
#ifndef KVD_LINK_KEYDIR_H
#define KVD_LINK_KEYDIR_H

#include <stdbool.h>
#include <stddef.h>

#include "daemon/link/link.h"
#include "daemon/link/link_curve.h"

struct config;
struct link_keydir;

/* Opens the directories (option keys_dir), and loads or creates the key pair:
 * NAME.key, mode 0600, and NAME.pub, a line for the allow-lists of other daemons.
 * ERR_CONFIG names the path and the remedy; ERR_BUSY: another daemon of this name uses
 * the directory. */
int link_keydir_new(const struct config *config, struct curve_keys *keys_p,
		    struct link_keydir **dir_p);
/* The name for a daemon in the lists of others: HOST.NAME, since daemons of many hosts
 * have the same name and a name of a list is a user. */
void link_keydir_name(const char *name, char out[LINK_USER_MAX]);
/* The directory of the key; that of the option is created if missing. Before the
 * sandbox drops file access (gate/sandbox.h). */
void link_keydir_home(const struct config *config, char *path, size_t size);
/* Publish the key: `line` as in an allow-list, NAME KEY HOST:PORT… A directory that
 * cannot be used is a warning. Until link_keydir_free(), or the end of the process. */
void link_keydir_show(struct link_keydir *dir, const char *key, const char *line);
void link_keydir_free(struct link_keydir *dir); /* NULL is fine */

/* Is it the key of a running daemon of this user and host? Returns its name. `dir` may
 * be NULL. */
bool link_keydir_find(struct link_keydir *dir, const char *key, char name[LINK_USER_MAX]);
/* Was the key found recently? Its daemon may be dialled again: it may be restarting. */
bool link_keydir_seen(const struct link_keydir *dir, const char *key);
/* The key of the daemon that has published HOST:PORT. */
bool link_keydir_at(struct link_keydir *dir, const char *host, const char *port,
		    char key[CURVE_KEY_CHARS + 1]);
/* May the daemon with that key be dialled at that address? It must have published it. */
bool link_keydir_tells(struct link_keydir *dir, const char *key, const char *host,
		       const char *port);
/* All running daemons, including this one. */
void link_keydir_each(struct link_keydir *dir,
		      void (*each)(void *arg, const char *name, const char *key),
		      void *arg);

#endif
