/* SPDX-License-Identifier: Apache-2.0 */
/* accounts: principals that have almost all they may. */
#ifndef KVD_TEST_ACCOUNTS_H
#define KVD_TEST_ACCOUNTS_H

#include "daemon/base/account.h"

/* The account has room for `left` bytes and no more, until charge_drop(filler). */
static inline void account_leave(struct account *account, uint64_t left,
				 struct charge *filler)
{
	struct accounts *accounts = account->accounts;

	if (!accounts->limit)
		accounts->limit = UINT64_C(1) << 32;
	assert_int_equal(charge_take(filler, account, ACCOUNT_LISTS,
				     accounts_share(accounts) - accounts->total - left),
			 0);
}

#endif
