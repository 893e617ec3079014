/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bounds of one table, one session or one message do not bound one user's total: there
 * are many tables, and one user opens many sessions. So everything that outlives the loop
 * iteration in which it arrived, and whose size its sender chooses, is charged to the
 * principal that owns it, and all of it together to one ceiling.
 *
 * One number is shared, and not each class capped: a cap per class would either be too
 * small for a principal that needs one class only, or, summed over classes and
 * principals, not bound the daemon's size. The rule of share.h keeps one greedy principal
 * from excluding the others: the last eighth is reserved for them.
 *
 * Accounts are found by name when a session or a peering starts, never on the data path:
 * a charge costs two additions and two comparisons. So a list is enough. An account lives
 * as long as it is referenced or has something charged; a peering that ends while its
 * objects are still in use leaves its account to them.
 *
 * Invariants: an account's total is the sum of its classes, the ceiling's that of the
 * accounts; the limit is held at each charge, so a limit that is lowered refuses until
 * enough was given back. An object is given back with the bytes that it was taken with,
 * because it carries them.
 */
#include "daemon/base/account.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/cgroup.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/base/metrics.h"
#include "daemon/base/share.h"

#define FEW_FDS_PART 16u /* of all engines': some sessions with their regions */
#define PARTS_SHARE 16u	 /* of the ceiling: incomplete messages of one principal */
#define PRESET_PART 16u
#define PRESET_MOST (UINT64_C(8) << 30)
#define PRESET_LEAST (UINT64_C(256) << 20)

const char *const account_class_names[ACCOUNT_CLASS_END] = {
#define ACCOUNT_NAME(id, name, help) [ACCOUNT_##id] = name,
	ACCOUNT_CLASSES(ACCOUNT_NAME)
#undef ACCOUNT_NAME
};

/* ---- accounts ---- */

struct account *account_get(struct accounts *accounts, const char *kind, const char *name)
{
	char full[ACCOUNT_NAME_MAX];
	struct account *account;

	snprintf(full, sizeof(full), "%s:%.80s", kind, name);
	for (account = accounts->first; account; account = account->next) {
		if (strcmp(account->name, full) == 0) {
			account->refs++;
			return account;
		}
	}
	account = mem_zalloc(sizeof(*account));
	if (!account)
		return NULL;
	account->accounts = accounts;
	account->refs = 1;
	memcpy(account->name, full, sizeof(full));
	account->next = accounts->first;
	accounts->first = account;
	accounts->count++;
	if (accounts->metrics)
		metrics_add(accounts->metrics, METRIC_PRINCIPALS, 1);
	return account;
}

static void account_free_unused(struct account *account)
{
	struct accounts *accounts = account->accounts;
	struct account **at = &accounts->first;

	if (account->refs)
		return;
	for (int i = 0; i < ACCOUNT_CLASS_END; i++) {
		if (account->objects[i])
			return;
	}
	assert(account->total == 0);
	while (*at != account)
		at = &(*at)->next;
	*at = account->next;
	accounts->count--;
	if (accounts->metrics)
		metrics_sub(accounts->metrics, METRIC_PRINCIPALS, 1);
	mem_free(account);
}

void account_ref(struct account *account)
{
	if (account)
		account->refs++;
}

void account_unref(struct account *account)
{
	if (!account)
		return;
	assert(account->refs > 0);
	account->refs--;
	account_free_unused(account);
}

bool accounts_idle(const struct accounts *accounts)
{
	return !accounts->first && accounts->total == 0;
}

uint64_t accounts_share(const struct accounts *accounts)
{
	return share_cap(accounts->limit, accounts->limit);
}

/* ---- charges ---- */

static void count_refused(struct account *account, enum account_class class)
{
	account->refused++;
	if (account->accounts->metrics)
		metrics_add(account->accounts->metrics,
			    METRIC_AT(ACCOUNT_REFUSED, class, 0), 1);
}

int account_refuse(struct account *account, enum account_class class, uint64_t bytes)
{
	const struct accounts *accounts = account->accounts;
	bool others = accounts->total + bytes <= accounts->limit;

	count_refused(account, class);
	return err_raise(
		ERR_LIMIT,
		"%s: %s: %llu bytes more; it holds %llu in all, %llu of them "
		"%s, and all principals %llu of %llu (memory_limit)%s",
		account->name, account_class_names[class], (unsigned long long)bytes,
		(unsigned long long)account->total,
		(unsigned long long)account->bytes[class], account_class_names[class],
		(unsigned long long)accounts->total, (unsigned long long)accounts->limit,
		others ? ", the last eighth is reserved for principals with little" : "");
}

int account_check(struct account *account, enum account_class class, uint64_t bytes)
{
	const struct accounts *accounts;
	uint64_t own, cap;

	if (!account || account->accounts->limit == 0)
		return 0;
	accounts = account->accounts;
	if (__builtin_add_overflow(account->total, bytes, &own))
		return err_pass(account_refuse(account, class, bytes));
	cap = share_cap(accounts->limit, own);
	if (bytes <= cap && accounts->total <= cap - bytes)
		return 0;
	return err_pass(account_refuse(account, class, bytes));
}

uint64_t account_room(const struct account *account)
{
	const struct accounts *accounts = account ? account->accounts : NULL;
	uint64_t share, few, room, rest;

	if (!accounts || accounts->limit == 0)
		return UINT64_MAX;
	share = accounts_share(accounts);
	room = accounts->total < share ? share - accounts->total : 0;
	rest = accounts->total < accounts->limit ? accounts->limit - accounts->total : 0;
	few = share_few(accounts->limit, account->total);
	few = few < rest ? few : rest;
	room = room > few ? room : few;
	return room ? room : 1;
}

bool account_is_full(const struct account *account)
{
	const struct accounts *accounts = account ? account->accounts : NULL;

	return accounts && accounts->limit &&
	       accounts->total >= share_cap(accounts->limit, account->total);
}

static void account_count(struct account *account, enum account_class class,
			  uint64_t bytes)
{
	account->bytes[class] += bytes;
	account->total += bytes;
	account->accounts->total += bytes;
	if (account->accounts->metrics)
		metrics_add(account->accounts->metrics,
			    METRIC_AT(ACCOUNT_BYTES, class, 0), bytes);
}

static void account_uncount(struct account *account, enum account_class class,
			    uint64_t bytes)
{
	assert(bytes <= account->bytes[class]);
	account->bytes[class] -= bytes;
	account->total -= bytes;
	account->accounts->total -= bytes;
	if (account->accounts->metrics)
		metrics_sub(account->accounts->metrics,
			    METRIC_AT(ACCOUNT_BYTES, class, 0), bytes);
}

void charge_force(struct charge *charge, struct account *account,
		  enum account_class class, uint64_t bytes)
{
	assert(!charge->account);
	if (!account)
		return;
	*charge = (struct charge){.account = account, .bytes = bytes, .class = class};
	account->objects[class]++;
	account_count(account, class, bytes);
}

int charge_take(struct charge *charge, struct account *account, enum account_class class,
		uint64_t bytes)
{
	int r = account_check(account, class, bytes);

	if (r < 0)
		return err_pass(r);
	charge_force(charge, account, class, bytes);
	return 0;
}

void charge_more_force(struct charge *charge, uint64_t bytes)
{
	if (!charge->account)
		return;
	charge->bytes += bytes;
	account_count(charge->account, charge->class, bytes);
}

int charge_more(struct charge *charge, uint64_t bytes)
{
	int r = account_check(charge->account, charge->class, bytes);

	if (r < 0)
		return err_pass(r);
	charge_more_force(charge, bytes);
	return 0;
}

static int parts_check(struct account *account, uint64_t bytes, uint64_t least)
{
	uint64_t most;

	if (!account || account->accounts->limit == 0)
		return 0;
	most = account->accounts->limit / PARTS_SHARE;
	most = most < least ? least : most;
	if (bytes <= most && account->bytes[ACCOUNT_PARTS] <= most - bytes)
		return err_pass(account_check(account, ACCOUNT_PARTS, bytes));
	count_refused(account, ACCOUNT_PARTS);
	return err_raise(ERR_LIMIT,
			 "%s: %s: %llu bytes more; it holds %llu of them, and one "
			 "principal may hold %llu (memory / %u)",
			 account->name, account_class_names[ACCOUNT_PARTS],
			 (unsigned long long)bytes,
			 (unsigned long long)account->bytes[ACCOUNT_PARTS],
			 (unsigned long long)most, PARTS_SHARE);
}

int charge_parts(struct charge *charge, struct account *account, uint64_t bytes,
		 uint64_t least)
{
	int r = parts_check(account, bytes, least);

	if (r < 0)
		return err_pass(r);
	if (charge->account)
		charge_more_force(charge, bytes);
	else
		charge_force(charge, account, ACCOUNT_PARTS, bytes);
	return 0;
}

void charge_less(struct charge *charge, uint64_t bytes)
{
	if (!charge->account)
		return;
	assert(bytes <= charge->bytes);
	charge->bytes -= bytes;
	account_uncount(charge->account, charge->class, bytes);
}

void charge_fds_force(struct charge *charge, unsigned int count)
{
	if (!charge->account)
		return;
	charge->fds += count;
	charge->account->fds += count;
	charge->account->accounts->fds += count;
}

int charge_fds(struct charge *charge, unsigned int count)
{
	struct account *account = charge->account;
	const struct accounts *accounts = account ? account->accounts : NULL;
	uint64_t cap = accounts ? accounts->fds_limit : 0;

	if (cap && account->fds >= cap / FEW_FDS_PART)
		cap -= cap / 8;
	if (cap && accounts->fds + count > cap) {
		count_refused(account, charge->class);
		return err_raise(
			ERR_LIMIT,
			"%s: %s: %u descriptors more; it holds about %llu, and "
			"all engines %llu of %llu, half of what the daemon may "
			"open (LimitNOFILE)%s",
			account->name, account_class_names[charge->class], count,
			(unsigned long long)account->fds,
			(unsigned long long)accounts->fds,
			(unsigned long long)accounts->fds_limit,
			cap < accounts->fds_limit
				? ", the last eighth is reserved for users with few"
				: "");
	}
	charge_fds_force(charge, count);
	return 0;
}

void charge_drop(struct charge *charge)
{
	struct charge all = charge_steal(charge);

	if (!all.account)
		return;
	account_uncount(all.account, all.class, all.bytes);
	all.account->fds -= all.fds;
	all.account->accounts->fds -= all.fds;
	assert(all.account->objects[all.class] > 0);
	all.account->objects[all.class]--;
	account_free_unused(all.account);
}

/* ---- the preset ---- */

uint64_t accounts_preset(void)
{
	uint64_t part = memory_limit() / PRESET_PART;

	return part < PRESET_LEAST  ? PRESET_LEAST
	       : part > PRESET_MOST ? PRESET_MOST
				    : part;
}
