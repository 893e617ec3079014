/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link_keydir: this daemon's key pair, made at the first start, and the public keys of
 * the daemons beside it: those of the same user on the same host, which need no line in
 * an allow-list.
 *
 * Who may write a directory that belongs to a user is that user. So a running daemon
 * shows its key as a file in such directories, and takes what it finds there for
 * daemons of its own user, who could read its secret and its memory in any case. A
 * directory that belongs to somebody else, that others may write, or that is a link, is
 * not used.
 */
#ifndef KVD_LINK_KEYDIR_H
#define KVD_LINK_KEYDIR_H

#include <stdbool.h>
#include <stddef.h>

#include "daemon/link/link.h"
#include "daemon/link/link_curve.h"

struct config;
struct link_keydir;

/* Opens the directories (the option keys_dir says which), and loads the pair or makes it:
 * NAME.key, mode 0600, beside it NAME.pub, a line for the allow-lists of others.
 * ERR_CONFIG names the path and what to do; ERR_BUSY: a daemon with this name uses that
 * directory. */
int link_keydir_new(const struct config *config, struct curve_keys *keys_p,
		    struct link_keydir **dir_p);
/* The name that the lists of others should have for a daemon: HOST.NAME, since daemons of
 * many hosts are called alike and a name of a list is a user. */
void link_keydir_name(const char *name, char out[LINK_USER_MAX]);
/* Where that is; the option's directory is made if it is missing: before files are given
 * up (gate/sandbox.h). */
void link_keydir_home(const struct config *config, char *path, size_t size);
/* Show the key: `line` as in an allow-list, NAME KEY HOST:PORT… A directory that cannot
 * be used is a warning. Until link_keydir_free(), or the end of the process. */
void link_keydir_show(struct link_keydir *dir, const char *key, const char *line);
void link_keydir_free(struct link_keydir *dir); /* NULL is fine */

/* Is it the key of a daemon that runs beside this one? Its name. `dir` may be NULL. */
bool link_keydir_find(struct link_keydir *dir, const char *key, char name[LINK_USER_MAX]);
/* Was it found lately? Who dialled it may do so again: it may be on its way back. */
bool link_keydir_seen(const struct link_keydir *dir, const char *key);
/* The key of the one that told HOST:PORT as its own. */
bool link_keydir_at(struct link_keydir *dir, const char *host, const char *port,
		    char key[CURVE_KEY_CHARS + 1]);
/* May the daemon with that key be dialled there? It must have told so. */
bool link_keydir_tells(struct link_keydir *dir, const char *key, const char *host,
		       const char *port);
/* All that run now, this one included. */
void link_keydir_each(struct link_keydir *dir,
		      void (*each)(void *arg, const char *name, const char *key),
		      void *arg);

#endif
