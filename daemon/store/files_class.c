/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A description is written when the first part of its class is, and before it: a part
 * without its description is lost. It does not depend on the size of the memory, so that
 * a daemon with more of it finds its files, and its name is a digest of its content,
 * which binds a slot's header to the meaning of its bytes. Engines choose the labels, so
 * the digest must be collision-resistant; and a description that is read is compared as a
 * whole with the one that this daemon would write.
 *
 * A description is removed with the last class of its name. Its space may return at once,
 * so one file has one struct class_words, and is written and removed in turn.
 *
 * The name of a file is its only checksum: a process that can write the directory can
 * make one that fits. So every label is checked like an engine's, and chunks are given
 * only to the user named in it.
 */
#include "daemon/store/files_class.h"

#include <errno.h>
#include <string.h>

#include <openssl/sha.h>

#include "daemon/base/context.h"
#include "daemon/base/cursor.h"
#include "daemon/base/hex.h"
#include "daemon/base/mem.h"
#include "daemon/store/files_impl.h"
#include "daemon/store/store_impl.h"

#define VERSION 1u
#define PREFIX "class-"
#define TENANT "uid:" /* before the number of a session's user */
#define UID_DIGITS 10u

/* ---- content ---- */

/* Independent of the size of the memory: as if it had one slot. */
static int put_layout(struct cursor *out, const struct store_class *class)
{
	struct canon *canon mem_cleanup(canon_freep) = NULL;
	const struct canon_args args = {.layout = class->canon->layout,
					.tokens = class->space->tokens,
					.memory_bytes = class->canon->slot_bytes};
	int r = canon_make(&args, &canon);

	return r < 0 ? err_pass(r) : err_pass(layout_encode(canon->layout, out));
}

static int put_words(struct cursor *out, const struct store_class *class)
{
	const struct store_space *space = class->space;
	int r;

	cursor_put_u32(out, VERSION);
	cursor_put_str(out, space->tenant->account->name);
	cursor_put_str(out, space->model);
	cursor_put_str(out, space->revision);
	cursor_put_str(out, space->scheme);
	cursor_put_str(out, space->rope);
	cursor_put_u32(out, space->tokens);
	r = put_layout(out, class);
	return r < 0 ? err_pass(r) : err_pass(cursor_check(out, "class"));
}

_Static_assert(SEAL_DIGEST_BYTES == SHA256_DIGEST_LENGTH, "a digest is a whole one");

static int digest_of(const void *data, size_t len, uint8_t digest[SEAL_DIGEST_BYTES])
{
	return SHA256(data, len, digest) ? 0 : err_raise(ERR_INTERNAL, "no SHA-256");
}

void class_words_name(const uint8_t digest[SEAL_DIGEST_BYTES],
		      char name[DISK_NAME_MAX + 1])
{
	memcpy(name, PREFIX, sizeof(PREFIX));
	hex_write(digest, SEAL_DIGEST_BYTES, name + strlen(PREFIX));
}

int class_words_print(const struct store_class *class, uint8_t **data_p, size_t *len_p)
{
	size_t cap = DISK_NAMED_BYTES_MAX;
	cleanup_free uint8_t *data = mem_alloc(cap);
	struct cursor out;
	int r;

	if (!data)
		return err_pass(-ENOMEM);
	cursor_write(&out, data, cap);
	r = put_words(&out, class);
	if (r < 0)
		return err_pass(r);
	*len_p = out.pos;
	*data_p = mem_dup(data, out.pos);
	return *data_p ? 0 : err_pass(-ENOMEM);
}

static int words_make(struct class_words *words, const struct store_class *class)
{
	int r = class_words_print(class, &words->data, &words->len);

	if (r >= 0)
		r = digest_of(words->data, words->len, words->digest);
	if (r < 0)
		return err_pass(r);
	class_words_name(words->digest, words->name);
	return 0;
}

static void words_free(struct class_words *words)
{
	mem_free(words->data);
	mem_free(words);
}

/* ---- writing, removing ---- */

static void words_settle(struct class_words *words);

static void on_words_done(struct disk_op *op)
{
	struct class_words *words = container_of(op, struct class_words, op);
	struct files *files = words->files;
	bool ok = op->result >= 0;

	words->busy = false;
	words->there = ok == (op->what == DISK_NAMED_WRITE);
	if (!ok) {
		files_note_fault(files, &op->err);
		words->failed_ns = loop_now_ns(files->store->kvd->loop);
	}
	if (!words->users)
		words_settle(words);
	files_go_on(files);
}

static void words_submit(struct class_words *words, enum disk_what what)
{
	words->busy = true;
	words->op = (struct disk_op){
		.what = what, .name = words->name, .done = on_words_done};
	if (what == DISK_NAMED_WRITE)
		words->op.iov[0] = (struct iovec){words->data, words->len};
	disk_submit(words->files->disk, &words->op);
}

/* Writing or removing it failed a moment ago. */
static bool words_wait(const struct class_words *words)
{
	return words->failed_ns &&
	       loop_now_ns(words->files->store->kvd->loop) - words->failed_ns <
		       FILES_RETRY_NS;
}

/* It has no class. A file that cannot be removed is removed at the next start. */
static void words_settle(struct class_words *words)
{
	const struct files *files = words->files;

	if (words->busy)
		return;
	if (words->there && files->scanned && !files->closed && !files->readonly &&
	    !words_wait(words)) {
		words_submit(words, DISK_NAMED_REMOVE);
		return;
	}
	strmap_remove(&words->files->words, words->name);
	words_free(words);
}

void class_words_leave(struct store_class *class)
{
	struct class_words *words = mem_steal(class->words);

	if (words->class == class)
		words->class = NULL;
	if (--words->users == 0)
		words_settle(words);
}

/* The class's description from now on: this one, or the existing one of that name. */
static int words_share(struct class_words **words_p, struct store_class *class)
{
	struct class_words *words = *words_p;
	struct files *files = words->files;
	struct class_words *old = strmap_get(&files->words, words->name);

	if (old &&
	    (old->len != words->len || memcmp(old->data, words->data, words->len) != 0))
		return err_raise(ERR_INTERNAL, "%s: name of two classes", words->name);
	if (old) {
		words_free(words);
		*words_p = old;
	} else if (strmap_put(&files->words, words->name, words) < 0) {
		return err_pass(-ENOMEM);
	}
	(*words_p)->users++;
	(*words_p)->class = class;
	class->words = *words_p;
	return 0;
}

static struct class_words *words_new(struct files *files, struct store_class *class)
{
	struct class_words *words = mem_zalloc(sizeof(*words));

	if (!words)
		return NULL;
	words->files = files;
	if (words_make(words, class) < 0 || words_share(&words, class) < 0) {
		words_free(words);
		return NULL;
	}
	return words;
}

struct class_words *class_words_of(struct files *files, struct store_class *class)
{
	struct class_words *words = class->words;

	if (!words)
		words = words_new(files, class);
	if (!words || words->busy || words->there)
		return words;
	if (words_wait(words)) {
		err_raise(ERR_LIMIT, "%s could not be written", words->name);
		return NULL;
	}
	words_submit(words, DISK_NAMED_WRITE);
	return words;
}

/* ---- reading ---- */

bool class_words_named(const char *name)
{
	return strncmp(name, PREFIX, strlen(PREFIX)) == 0 &&
	       strlen(name) == strlen(PREFIX) + HEX_CHARS(SEAL_DIGEST_BYTES);
}

struct description {
	char tenant[ACCOUNT_NAME_MAX], model[STORE_WORD_MAX + 1];
	char revision[STORE_WORD_MAX + 1], scheme[STORE_WORD_MAX + 1];
	char rope[STORE_WORD_MAX + 1];
	uint32_t tokens;
	struct layout *layout;
};

static int description_read(const void *data, size_t len, struct description *found)
{
	struct cursor in;
	uint32_t version;
	int r;

	cursor_read(&in, data, len);
	version = cursor_get_u32(&in);
	if (version != VERSION)
		return err_raise(ERR_VERSION,
				 "format %u, but this daemon's is %u; start the kvd "
				 "that wrote it, or empty chunk_dir",
				 version, VERSION);
	cursor_get_str(&in, found->tenant, sizeof(found->tenant));
	cursor_get_str(&in, found->model, sizeof(found->model));
	cursor_get_str(&in, found->revision, sizeof(found->revision));
	cursor_get_str(&in, found->scheme, sizeof(found->scheme));
	cursor_get_str(&in, found->rope, sizeof(found->rope));
	found->tokens = cursor_get_u32(&in);
	r = cursor_check(&in, "class");
	return r < 0 ? err_pass(r) : err_pass(layout_decode(&in, &found->layout));
}

static int described_tenant(struct store *store, const struct description *found,
			    uint64_t generation, struct store_tenant **tenant_p)
{
	const char *name = found->tenant + strlen(TENANT);
	struct account *account;
	int r;

	if (strncmp(found->tenant, TENANT, strlen(TENANT)) != 0 || !*name ||
	    strlen(name) > UID_DIGITS || name[strspn(name, "0123456789")])
		return err_raise(ERR_PROTO, "no known user");
	account = account_get(&store->kvd->accounts, "uid", name);
	if (!account)
		return err_pass(-ENOMEM);
	r = store_tenant_of(store, account, generation, tenant_p);
	account_unref(account); /* the tenant has its own */
	return err_pass(r);
}

static int described_class(struct store *store, const struct description *found,
			   uint64_t generation, struct store_class **class_p)
{
	const struct store_space_args args = {.model = found->model,
					      .revision = found->revision,
					      .scheme = found->scheme,
					      .rope = found->rope,
					      .tokens = found->tokens};
	const struct canon_args canon_args = {.layout = found->layout,
					      .tokens = found->tokens,
					      .memory_bytes = store->memory_bytes};
	struct canon *canon mem_cleanup(canon_freep) = NULL;
	struct store_tenant *tenant;
	struct store_space *space;
	int r = store_words_check(&args);

	if (r >= 0)
		r = canon_make(&canon_args, &canon);
	if (r >= 0 && canon->slot_bytes > arena_slot_most(store->arena))
		r = err_raise(ERR_TOOBIG,
			      "parts of %llu bytes are too large for chunk_memory",
			      (unsigned long long)canon->slot_bytes);
	if (r >= 0)
		r = described_tenant(store, found, generation, &tenant);
	if (r >= 0)
		r = store_space_of(store, tenant, &args, canon, generation, &space);
	if (r >= 0)
		r = store_class_get(space, canon, generation, class_p);
	return r < 0 ? err_pass(r) : 0;
}

int class_words_scan(struct store *store, const void *data, size_t len,
		     uint64_t generation, struct store_class **class_p)
{
	struct description found = {.layout = NULL};
	int r = description_read(data, len, &found);

	if (r >= 0)
		r = described_class(store, &found, generation, class_p);
	layout_free(found.layout);
	return err_pass(r);
}

int class_words_read(struct store *store, const char *name, const void *data, size_t len,
		     uint64_t generation, struct store_class **class_p)
{
	uint8_t digest[SEAL_DIGEST_BYTES], named[SEAL_DIGEST_BYTES];
	struct class_words *words;
	int r = digest_of(data, len, digest);

	if (r < 0)
		return err_pass(r);
	if (!hex_read(name + strlen(PREFIX), named, SEAL_DIGEST_BYTES) ||
	    memcmp(digest, named, SEAL_DIGEST_BYTES) != 0)
		return err_raise(ERR_PROTO, "%s: content differs from its digest", name);
	r = class_words_scan(store, data, len, generation, class_p);
	if (r < 0)
		return err_prefix(r, "%s", name);
	words = (*class_p)->words ? (*class_p)->words : words_new(store->files, *class_p);
	if (!words)
		return err_pass(-ENOMEM);
	if (words->len != len || memcmp(words->data, data, len) != 0)
		return err_raise(ERR_PROTO,
				 "%s: this daemon describes the class "
				 "differently",
				 name);
	words->there = true;
	return 0;
}
